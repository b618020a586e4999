// A prompt to the server's own API, and its tokens as they stream.
import { byId, el, seconds } from "./dom.js";

const HINTS = {
  completion: "The text goes on here, token by token.",
  chat: "Say something. Each further turn begins with all earlier ones, which the prefix cache knows.",
};
const PLACEHOLDERS = { completion: "A text to continue", chat: "A message" };

/** The data of server-sent events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    left += value;
    const parts = left.split("\n\n");
    left = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}

export class Playground {
  /** `headers()` are those of every request; `locked()` is called where the key is refused. */
  constructor(base, headers, locked) {
    Object.assign(this, { base, headers, locked, kind: "completion", running: null, turns: [] });
    this.model = null;
    this.said = byId("said");
    this.prompt = byId("prompt");
    byId("as-completion").addEventListener("click", () => this.turnTo("completion"));
    byId("as-chat").addEventListener("click", () => this.turnTo("chat"));
    byId("clear").addEventListener("click", () => this.clear());
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      }
    });
    this.clear();
  }

  models(names) {
    [this.model] = names;
  }

  turnTo(kind) {
    if (this.running || kind === this.kind) return;
    this.kind = kind;
    byId("as-completion").setAttribute("aria-pressed", kind === "completion");
    byId("as-chat").setAttribute("aria-pressed", kind === "chat");
    this.prompt.placeholder = PLACEHOLDERS[kind];
    this.clear();
  }

  clear() {
    if (this.running) this.running.abort();
    this.turns = [];
    this.said.replaceChildren(el("span", { class: "hint" }, HINTS[this.kind]));
    byId("told").replaceChildren();
    this.fail(null);
  }

  fail(message) {
    byId("play-error").hidden = message === null;
    byId("play-error").textContent = message ?? "";
  }

  /** A number of the form; null where it is left empty. */
  number(id) {
    const text = byId(id).value.trim();
    return text === "" ? null : Number(text);
  }

  body(prompt) {
    const shared = {
      model: this.model,
      max_tokens: this.number("max-tokens"),
      temperature: this.number("temperature"),
      priority: this.number("priority"),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (this.kind === "completion") return ["v1/completions", { ...shared, prompt }];
    const messages = [...this.turns, { role: "user", content: prompt }];
    return ["v1/chat/completions", { ...shared, messages }];
  }

  /** Where the answer is written: behind the prompt, or in a turn of its own. */
  open(prompt) {
    if (this.kind === "completion") {
      const answer = el("span", { class: "answer" });
      this.said.replaceChildren(el("span", { class: "given" }, prompt), answer);
      return answer;
    }
    if (!this.turns.length) this.said.replaceChildren();
    const answer = el("div", { class: "turn assistant" });
    this.said.append(el("div", { class: "turn user" }, prompt), answer);
    return answer;
  }

  async send() {
    const prompt = this.prompt.value;
    if (!prompt.trim() || !this.model) return;
    const [path, body] = this.body(prompt);
    const answer = this.open(prompt);
    const told = { begin: performance.now(), text: "", pieces: 0, usage: null, reason: null };
    this.running = new AbortController();
    byId("send").textContent = "Stop";
    this.fail(null);
    this.tell(told);
    this.scroll(true);
    try {
      await this.stream(path, body, answer, told);
    } catch (error) {
      if (error.name === "AbortError") told.reason = "stopped";
      else this.fail(error.message);
    } finally {
      this.running = null;
      byId("send").textContent = "Send";
      answer.textContent = told.text; // one piece again, for a long text has thousands
      this.tell(told);
      this.end(prompt, answer, told);
    }
  }

  async stream(path, body, answer, told) {
    const response = await fetch(new URL(path, this.base), {
      method: "POST",
      headers: { ...this.headers(), "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (response.status === 401) this.locked();
    if (!response.ok) throw new Error(await problem(response));
    const predicted = response.headers.get("x-predicted-ttft-ms");
    told.predicted = predicted === null ? null : Number(predicted) / 1000;
    this.tell(told);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      told.usage = event.usage ?? told.usage;
      const [choice] = event.choices;
      if (!choice) continue;
      told.reason = choice.finish_reason ?? told.reason;
      this.add(choice.text ?? choice.delta?.content ?? "", answer, told);
    }
  }

  add(text, answer, told) {
    if (!text) return;
    const now = performance.now();
    told.first ??= now;
    told.last = now;
    told.pieces += 1;
    told.text += text;
    const follows = this.atEnd();
    answer.append(el("span", { class: "piece" }, text));
    this.scroll(follows);
    this.tell(told);
  }

  end(prompt, answer, told) {
    if (!told.text) answer.append(el("span", { class: "hint" }, "no text"));
    if (this.kind !== "chat" || !told.reason) return;
    this.turns.push({ role: "user", content: prompt }, { role: "assistant", content: told.text });
    this.prompt.value = "";
  }

  tell(told) {
    const parts = [];
    const add = (name, text) => parts.push(el("div", {}, el("dt", {}, name), el("dd", {}, text)));
    const waited = ((told.first ?? performance.now()) - told.begin) / 1000;
    if (told.first || !told.reason) add("first token", told.first ? seconds(waited) : "…");
    if (told.predicted !== undefined) {
      add("predicted", told.predicted === null ? "–" : seconds(told.predicted));
    }
    const tokens = told.usage?.completion_tokens ?? told.pieces;
    if (tokens) add("tokens", `${tokens}`);
    const past = (told.last - told.first) / 1000;
    if (tokens > 1 && past > 0) add("tokens/s", ((tokens - 1) / past).toFixed(1));
    const details = told.usage?.prompt_tokens_details;
    if (told.usage) {
      add("prompt", `${told.usage.prompt_tokens}, ${details?.cached_tokens ?? 0} cached`);
    }
    if (told.reason) add("end", told.reason);
    byId("told").replaceChildren(...parts);
  }

  atEnd() {
    return this.said.scrollHeight - this.said.scrollTop - this.said.clientHeight < 40;
  }

  scroll(follows) {
    if (follows) this.said.scrollTop = this.said.scrollHeight;
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}
