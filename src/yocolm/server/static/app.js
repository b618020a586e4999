// The live page: asks for numbers as often as the server wants to be asked, and draws them.
import { Agreement, Areas } from "./charts.js";
import { byId, bytes, count, el, median, percent, seconds } from "./dom.js";
import { Playground } from "./playground.js";

const BASE = new URL("../", import.meta.url);
const KEY = "yocolm-key";
const BIN = 3; // seconds that are drawn as one point
const RATE = 5; // seconds over which rates of now are taken
const KINDS = { global_kv: "Global KV", window: "Windows", recurrent: "Recurrent state" };

// Access

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Storage is closed to this page: the key is kept until the page is left.
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

function remember(text) {
  key = text;
  try {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

function askForKey() {
  byId("key-wrong").hidden = !key;
  remember(null);
  byId("main").hidden = true;
  byId("key").hidden = false;
  byId("key-text").focus();
  tellState("locked", "warn");
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  remember(byId("key-text").value.trim());
  byId("key-text").value = "";
  look();
});

// Data

let history = [];
let last = null; // the server's clock at the last answer
let uptime = 0;
let timer = null;
let failures = 0;

async function look() {
  clearTimeout(timer);
  if (document.hidden) return; // goes on when it is looked at again
  const url = new URL("live.json", BASE);
  if (last !== null) url.searchParams.set("since", last);
  try {
    const answer = await fetch(url, { headers: headers(), cache: "no-store" });
    if (answer.status === 401) {
      askForKey();
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const data = await answer.json();
    failures = 0;
    byId("key").hidden = true;
    byId("main").hidden = false;
    show(data);
    timer = setTimeout(look, 1000 * data.pace);
  } catch (error) {
    console.warn(error);
    failures += 1;
    tellState("no connection", "bad");
    timer = setTimeout(look, Math.min(15, 2 ** failures) * 1000);
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("key").hidden) look();
});

function merge(data) {
  if (data.uptime < uptime) history = []; // it was started anew
  last = data.now;
  uptime = data.uptime;
  if (!data.history.length) return;
  const first = data.history[0][0];
  history = history.filter((row) => row[0] < first).concat(data.history).slice(-300);
}

/** Values of a column in the last rows. */
function column(data, name, length = history.length) {
  const place = data.columns.indexOf(name);
  return history.slice(-length).map((row) => row[place]);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const rate = (data, name) => sum(column(data, name, RATE)) / RATE;

/** Means of a few seconds each: bins begin at whole multiples, so that shapes stay as they move. */
function bins(data, names, over = null) {
  const places = names.map((name) => data.columns.indexOf(name));
  const line = over === null ? -1 : data.columns.indexOf(over);
  const found = [];
  for (let i = 0; i < history.length;) {
    const number = Math.floor(history[i][0] / BIN);
    const begin = i;
    while (i < history.length && Math.floor(history[i][0] / BIN) === number) i += 1;
    const part = history.slice(begin, i);
    const mean = (place) => sum(part.map((row) => row[place])) / part.length;
    const at = number * BIN + BIN / 2;
    found.push({ at, values: places.map(mean), line: line < 0 ? 0 : mean(line) });
  }
  if (found.length) { // to the edges, so that nothing hops when a bin ends
    found[found.length - 1].at = history[history.length - 1][0] + 1;
  }
  return found;
}

// Charts

const share = (value) => percent(value);
const phases = new Areas(byId("phases"), "Share of each second by phase, over five minutes", {
  series: [
    { name: "self-prefill", colour: "blue" },
    { name: "KV finalize", colour: "violet" },
    { name: "cross-decode", colour: "orange" },
    { name: "sample", colour: "green" },
    { name: "overhead", colour: "gray" },
  ],
  line: { name: "predicted", colour: "text" },
  format: share,
  top: 1,
});
const rows = new Areas(byId("rows"), "Tokens a second, over five minutes", {
  series: [
    { name: "both halves", colour: "orange" },
    { name: "first half only: rows skipped", colour: "blue" },
  ],
  format: count,
});
const queue = new Areas(byId("queue"), "Requests running and waiting, over five minutes", {
  series: [{ name: "running", colour: "green" }, { name: "waiting", colour: "yellow" }],
  format: count,
});
const held = [{ name: "in use", colour: "blue" }, { name: "kept for a hit", colour: "pale" }];
const fine = (value) => percent(value, value > 0 && value < 0.02 ? 2 : value < 0.2 ? 1 : 0);
const pages = new Areas(byId("pages"), "Pages held, over five minutes", {
  series: held, format: fine, most: 1,
});
const slots = new Areas(byId("slots"), "Slots held, over five minutes", {
  series: held, format: fine, most: 1,
});
const ttft = new Agreement(
  byId("ttft"), "Predicted and actual time to first token", "No predictions yet",
);
const playground = new Playground(BASE, headers, askForKey);

// Drawing

function show(data) {
  merge(data);
  const states = { serving: "good", draining: "warn", stopped: "bad" };
  tellState(data.state, states[data.state] ?? "bad");
  byId("model").textContent = data.models[0];
  document.title = `${data.models[0]} · yocolm`;
  byId("about").textContent =
    `yocolm ${data.version} · up ${seconds(data.uptime)} · context ${count(data.max_model_len)} `
    + `tokens · policy ${data.policy}`;
  playground.models(data.models);
  showTiles(data);
  showCharts(data);
  showMeters(data);
  showRequests(data);
}

function tellState(text, kind) {
  const pill = byId("state");
  pill.textContent = text;
  pill.className = `pill ${kind}`;
}

function tile(name, value, unit, note) {
  const small = unit ? el("small", {}, ` ${unit}`) : null;
  return el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value, small),
    el("span", {}, note));
}

function showTiles(data) {
  const { queue: now, totals } = data;
  const tokens = sum(column(data, "tokens"));
  const skipped = tokens - sum(column(data, "rows"));
  const recent = data.ttft.slice(-50);
  const actual = median(recent.map((pair) => pair[2]));
  const predicted = median(recent.map((pair) => pair[1]).filter((value) => value !== null));
  const hits = totals.queried ? totals.cached / totals.queried : NaN;
  const busy = sum(["self_prefill", "kv_finalize", "cross_decode", "sample", "overhead"]
    .map((name) => rate(data, name)));
  byId("tiles").replaceChildren(
    tile("Output", count(rate(data, "draws")), "tokens/s",
      `${count(rate(data, "tokens"))} computed/s`),
    tile("Running", `${now.running}`, `of ${now.max_running}`,
      `${now.waiting} waiting${now.swapped ? `, ${now.swapped} swapped out` : ""}`),
    tile("Engine busy", percent(Math.min(1, busy)), "", `${count(rate(data, "steps"))} steps/s`),
    tile("Rows skipped", tokens ? percent(skipped / tokens) : "–", "",
      `${count(totals.tokens - totals.rows)} since start`),
    tile("First token", seconds(actual), "", `predicted ${seconds(predicted)}, median`),
    tile("Prefix cache", percent(hits), "hit",
      `${count(totals.cached)} of ${count(totals.queried)} tokens`),
  );
}

function showCharts(data) {
  const { now } = data;
  const names = ["self_prefill", "kv_finalize", "cross_decode", "sample", "overhead"];
  phases.update(bins(data, names, "predicted"), now);
  const both = bins(data, ["rows", "tokens"]);
  rows.update(both.map(({ at, values: [through, all] }) =>
    ({ at, values: [through, Math.max(0, all - through)] })), now);
  queue.update(bins(data, ["running", "waiting"]), now);
  for (const [chart, name] of [[pages, "pages"], [slots, "slots"]]) {
    const all = Math.max(1, data[name][2]);
    chart.update(bins(data, [`${name}_used`, `${name}_kept`]).map(({ at, values }) =>
      ({ at, values: values.map((value) => value / all) })), now);
  }
  const pairs = data.ttft.filter(([, predicted, actual]) => predicted !== null && actual > 0);
  const errors = pairs.map(([, predicted, actual]) => Math.abs(predicted - actual) / actual);
  ttft.update(pairs, now, errors.length
    ? `median error ${percent(median(errors))}, last ${errors.length} requests`
    : "each request as a dot; on the line: as predicted");
}

function meter(name, used, kept, capacity) {
  const part = (value, colour) => {
    const bar = el("div", { class: `fill ${colour}` });
    bar.style.width = `${(100 * value) / Math.max(1, capacity)}%`;
    return bar;
  };
  const text = `${bytes(used)}${kept ? ` + ${bytes(kept)} kept` : ""} of ${bytes(capacity)}`;
  return el("div", { class: "meter" },
    el("div", {}, el("span", {}, name), el("span", {}, text)),
    el("div", { class: "track" }, part(used, "blue"), part(kept, "pale")));
}

function showMeters(data) {
  const found = data.pools.filter((pool) => pool.capacity > 0)
    .map((pool) => meter(KINDS[pool.kind], pool.used, pool.kept, pool.capacity));
  const { swap } = data;
  if (swap.capacity) found.push(meter("Swapped out", swap.used, 0, swap.capacity));
  byId("meters").replaceChildren(...found);
}

function showRequests(data) {
  const listed = data.requests;
  byId("idle").hidden = listed.length > 0;
  byId("requests").hidden = listed.length === 0;
  byId("listed").replaceChildren(...listed.map(requestRow));
  const left = data.queue.running + data.queue.waiting + data.queue.swapped - listed.length;
  byId("more").hidden = left <= 0 || !listed.length;
  byId("more").textContent = `and ${left} more`;
}

function requestRow(one) {
  const id = one.sample === null ? one.id : `${one.id} #${one.sample}`;
  const swapped = one.state === "swapped";
  const colour = swapped ? "violet" : one.state === "decode" ? "orange" : "blue";
  const bar = el("div", { class: `fill ${colour}` });
  const done = swapped ? one.total_tokens : one.computed_tokens;
  bar.style.width = `${(100 * done) / Math.max(1, one.total_tokens)}%`;
  const computed = swapped ? "in the swap space" : `${done} of ${one.total_tokens}`;
  const prompt = one.cached_tokens
    ? `${count(one.prompt_tokens)} (${count(one.cached_tokens)} cached)` : count(one.prompt_tokens);
  const first = one.predicted_ttft === null ? seconds(one.ttft)
    : `${seconds(one.ttft)} / ${seconds(one.predicted_ttft)}`;
  const cell = (name, text, kind = "num") => el("td", { class: kind, "data-name": name }, text);
  return el("tr", {},
    el("td", { class: "id", title: id }, id),
    el("td", {}, el("span", { class: `kind ${one.state}` }, one.state)),
    cell("priority", `${one.priority}`),
    cell("prompt", prompt),
    el("td", { class: "computed" }, el("span", { class: "track" }, bar),
      el("span", { class: "amount" }, computed)),
    cell("output", count(one.output_tokens)),
    cell("age", seconds(one.age)),
    cell("first token", first));
}

look();
