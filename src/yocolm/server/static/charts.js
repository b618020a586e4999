// Small charts: areas upon each other over the last minutes, and predicted against actual.
import { brief, el, seconds, svg } from "./dom.js";

const MARGIN = { top: 8, right: 4, bottom: 18, left: 48 };

/** The least round number that holds `value`, and whose half is round too. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((m) => m * power).find((edge) => edge >= value * 0.999);
}

class Chart {
  constructor(host, label) {
    this.host = host;
    this.label = label;
    this.legend = el("div", { class: "legend" });
    this.plot = el("div", { class: "plot" });
    this.tip = el("div", { class: "tip", hidden: "" });
    host.append(this.legend, this.plot);
    this.plot.append(this.tip);
    this.pointer = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  point(event) {
    this.pointer = event.clientX - this.plot.getBoundingClientRect().left;
    this.pointerY = event.clientY - this.plot.getBoundingClientRect().top;
    this.draw();
  }

  size() {
    return [this.plot.clientWidth, this.plot.clientHeight];
  }

  show(...parts) {
    const [width, height] = this.size();
    const label = { role: "img", "aria-label": this.label };
    const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, ...label });
    drawn.append(...parts);
    this.plot.querySelector("svg")?.remove();
    this.plot.prepend(drawn);
  }

  /** Lines of text at `x`, each with the colour of its series. */
  tell(x, title, lines) {
    this.tip.replaceChildren(el("b", {}, title));
    for (const [name, text, colour] of lines) {
      const mark = colour ? el("i", { class: `dot ${colour}` }) : null;
      this.tip.append(el("div", {}, el("span", {}, mark, name), el("span", {}, text)));
    }
    this.tip.hidden = false;
    const [width] = this.size();
    const own = this.tip.offsetWidth;
    this.tip.style.left = `${x + own + 16 > width ? Math.max(0, x - own - 10) : x + 10}px`;
  }
}

/** Areas upon each other. `series`: {name, colour} from the bottom up; `line`: one drawn over them.
 * `top`: of the axis, whatever there is to show; `most`: the same at most. */
export class Areas extends Chart {
  constructor(host, label, { series, format, top = null, most = Infinity, line = null, span = 300 }) {
    super(host, label);
    Object.assign(this, { series, format, top, most, line, span, bins: [], now: 0 });
    for (const { name, colour } of [...series, ...(line ? [line] : [])]) {
      const kind = line && name === line.name ? "dash" : "dot";
      this.legend.append(el("span", {}, el("i", { class: `${kind} ${colour}` }), name));
    }
  }

  /** `bins`: {at, values, line}, ascending in `at`, seconds on the clock of `now`. */
  update(bins, now) {
    Object.assign(this, { bins, now });
    this.draw();
  }

  draw() {
    const [width, height] = this.size();
    if (!width || !this.bins.length) return;
    const { bins, now, span } = this;
    const sums = bins.map((bin) => bin.values.reduce((sum, value) => sum + value, 0));
    const most = Math.max(...sums, ...bins.map((bin) => (this.line ? bin.line : 0)));
    const top = this.top ?? Math.min(this.most, ceiling(most));
    const x = (at) => width - MARGIN.right
      - ((now - at) / span) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom
      - (Math.min(value, top) / top) * (height - MARGIN.top - MARGIN.bottom);
    const parts = [...this.axes(x, y, top, width, height)];
    const shown = bins.filter((bin) => x(bin.at) >= MARGIN.left);
    const below = shown.map(() => 0);
    this.series.forEach(({ colour }, index) => {
      const lower = shown.map((bin, i) => `${x(bin.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      shown.forEach((bin, i) => { below[i] += bin.values[index]; });
      const upper = shown.map((bin, i) => `${x(bin.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      parts.push(svg("polygon", {
        class: `area ${colour}`, points: [...upper, ...lower.reverse()].join(" "),
      }));
    });
    if (this.line) {
      let path = "";
      let pen = "M";
      for (const bin of shown) {
        if (bin.line > 0) {
          path += `${pen}${x(bin.at).toFixed(1)} ${y(bin.line).toFixed(1)}`;
          pen = "L";
        } else {
          pen = "M"; // nothing ran
        }
      }
      parts.push(svg("path", { class: `over ${this.line.colour}`, d: path }));
    }
    this.hover(shown, sums.slice(-shown.length), x, height, parts);
    this.show(...parts);
  }

  * axes(x, y, top, width, height) {
    for (const value of [0, top / 2, top]) {
      const at = y(value);
      yield svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at });
      yield svg("text", { class: "tick", x: MARGIN.left - 6, y: at + 3.5, "text-anchor": "end" },
        this.format(value));
    }
    for (let past = 0; past <= this.span; past += 120) {
      const text = past ? `−${past / 60} min` : "now";
      const anchor = past === 0 ? "end" : "middle";
      const at = x(this.now - past);
      yield svg("text", { class: "tick", x: at, y: height - 4, "text-anchor": anchor }, text);
    }
  }

  hover(shown, sums, x, height, parts) {
    this.tip.hidden = true;
    if (this.pointer === null || !shown.length) return;
    const distance = (bin) => Math.abs(x(bin.at) - this.pointer);
    let best = 0;
    shown.forEach((bin, i) => { if (distance(bin) < distance(shown[best])) best = i; });
    const bin = shown[best];
    const at = x(bin.at);
    parts.push(svg("line", {
      class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom,
    }));
    const lines = this.series.map(({ name, colour }, i) =>
      [name, this.format(bin.values[i]), colour]).reverse();
    if (this.line) lines.unshift([this.line.name, this.format(bin.line), this.line.colour]);
    if (this.series.length > 1) lines.push(["together", this.format(sums[best]), null]);
    this.tell(at, `${seconds(Math.max(0, Math.round(this.now - bin.at)))} ago`, lines);
  }
}

/** Predicted against actual on logarithmic axes; what is on the diagonal came as predicted. */
export class Agreement extends Chart {
  constructor(host, label, empty) {
    super(host, label);
    Object.assign(this, { pairs: [], now: 0, empty });
    this.summary = el("span", {});
    this.legend.append(this.summary);
  }

  /** `pairs`: [at, predicted, actual] in seconds. */
  update(pairs, now, summary) {
    Object.assign(this, { pairs: pairs.filter((p) => p[1] > 0 && p[2] > 0), now });
    this.summary.textContent = summary;
    this.draw();
  }

  draw() {
    const [width, height] = this.size();
    if (!width) return;
    this.tip.hidden = true;
    if (!this.pairs.length) {
      this.show(svg("text", {
        class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle",
      }, this.empty));
      return;
    }
    const logs = this.pairs.flatMap((pair) => [Math.log10(pair[1]), Math.log10(pair[2])]);
    const low = Math.min(...logs) - 0.15;
    const high = Math.max(Math.max(...logs) + 0.15, low + 0.6);
    const scale = (from, to) => (value) =>
      from + ((Math.log10(value) - low) / (high - low)) * (to - from);
    const x = scale(MARGIN.left, width - MARGIN.right);
    const y = scale(height - MARGIN.bottom, MARGIN.top);
    const parts = [...this.axes(x, y, low, high, width, height)];
    let best = null;
    const near = (pair) => Math.hypot(x(pair[1]) - this.pointer, y(pair[2]) - this.pointerY);
    for (const pair of this.pairs) {
      const age = Math.min(1, Math.max(0, (this.now - pair[0]) / 300));
      parts.push(svg("circle", {
        class: "pair", cx: x(pair[1]), cy: y(pair[2]), r: 3.6, opacity: 0.85 - 0.55 * age,
      }));
      if (this.pointer !== null && near(pair) < (best ? near(best) : 24)) best = pair;
    }
    if (best) parts.push(svg("circle", { class: "ring", cx: x(best[1]), cy: y(best[2]), r: 6 }));
    this.show(...parts);
    if (best) {
      this.tell(x(best[1]), `${seconds(Math.max(0, Math.round(this.now - best[0])))} ago`, [
        ["predicted", seconds(best[1]), null], ["actual", seconds(best[2]), null]]);
    }
  }

  * axes(x, y, low, high, width, height) {
    const ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
      for (const m of high - low > 1.6 ? [1] : [1, 2, 5]) ticks.push(m * 10 ** power);
    }
    const inside = ticks.filter((t) => Math.log10(t) >= low && Math.log10(t) <= high);
    for (const tick of inside) {
      const across = { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) };
      yield svg("line", { class: "grid", ...across });
      yield svg("text", {
        class: "tick", x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end",
      }, brief(tick));
      yield svg("text", {
        class: "tick", x: Math.min(x(tick), width - 16), y: height - 4, "text-anchor": "middle",
      }, brief(tick));
    }
    const ends = [10 ** low, 10 ** high];
    yield svg("line", {
      class: "diagonal", x1: x(ends[0]), y1: y(ends[0]), x2: x(ends[1]), y2: y(ends[1]),
    });
  }
}
