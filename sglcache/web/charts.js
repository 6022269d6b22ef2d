// Numbers over time, on small canvases, from a ring that the page keeps: what was before it was opened is Prometheus's.

import { count } from "/web/tree.js";

export const KEPT = 600; // samples: ten minutes

const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
export const short = (value) => (Math.abs(value) < 10000 ? count(Math.round(value * 10) / 10) : compact.format(value));

// Samples of counters, by time; a life's end starts again, for its numbers do.
export class Ring {
  constructor() { this.samples = []; }

  add(at, values, epoch) {
    const last = this.samples.at(-1);
    this.samples.push({ at, values, epoch, fresh: !last || last.epoch !== epoch || at - last.at > 10 });
    if (this.samples.length > KEPT) this.samples.shift();
  }

  gauges(pick) { return this.samples.map((sample) => ({ at: sample.at, values: pick(sample.values), gap: sample.fresh })); }

  rates(pick) {
    const out = [];
    for (let at = 1; at < this.samples.length; at++) {
      const one = this.samples[at - 1], other = this.samples[at], took = other.at - one.at;
      if (other.fresh || took <= 0) { out.push({ at: other.at, values: null, gap: true }); continue; }
      const before = pick(one.values), after = pick(other.values);
      out.push({ at: other.at, values: after.map((value, i) => Math.max(0, value - before[i]) / took), gap: false });
    }
    return out;
  }
}

export class Chart {
  // series: [{name, color (of the theme), dash}]; stacked: areas on one another, up to `top` if that is said.
  constructor(parent, title, series, { stacked = false, tall = false, unit = "" } = {}) {
    this.series = series;
    this.stacked = stacked;
    this.unit = unit;
    this.box = document.createElement("div");
    this.box.className = tall ? "chart tall" : "chart";
    this.caption = document.createElement("div");
    this.caption.className = "cap";
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.title = document.createElement("b");
    this.title.textContent = title;
    this.caption.append(this.title);
    this.marks = series.map((each) => {
      const span = document.createElement("span"), swatch = document.createElement("i"), value = document.createElement("span");
      swatch.className = "swatch";
      span.append(swatch, `${each.name} `, value);
      this.caption.append(span);
      return { swatch, value };
    });
    this.box.append(this.caption, this.canvas);
    parent.append(this.box);
  }

  draw(points, theme, top = null) {
    const last = points.findLast((point) => point.values);
    this.series.forEach((each, i) => {
      this.marks[i].swatch.style.background = theme(each.color);
      this.marks[i].value.textContent = last ? short(last.values[i]) : "–";
    });
    const spoken = this.series.map((each, i) => `${each.name} ${last ? short(last.values[i]) : "unknown"}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title.textContent}: ${spoken} ${this.unit}`);
    const ratio = devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
    const width = Math.round(box.width), height = Math.round(box.height);
    if (!width || !height) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const at = this.canvas.getContext("2d");
    at.setTransform(ratio, 0, 0, ratio, 0, 0);
    at.clearRect(0, 0, width, height);
    const end = points.length ? points.at(-1).at : 0, span = 300, from = end - span;
    const seen = points.filter((point) => point.at >= from);
    const sum = (values) => (this.stacked ? values.reduce((one, other) => one + other, 0) : Math.max(...values));
    const most = top ?? nice(Math.max(1, ...seen.filter((point) => point.values).map((point) => sum(point.values))));
    const x = (time) => ((time - from) / span) * (width - 1), y = (value) => height - 1 - (value / most) * (height - 14);
    at.strokeStyle = theme("line");
    at.lineWidth = 1;
    at.beginPath();
    for (const share of [0, 0.5, 1]) { at.moveTo(0, Math.round(y(most * share)) + 0.5); at.lineTo(width, Math.round(y(most * share)) + 0.5); }
    for (let back = 60; back < span; back += 60) { at.moveTo(Math.round(x(end - back)) + 0.5, 13); at.lineTo(Math.round(x(end - back)) + 0.5, height); }
    at.stroke();
    for (const run of runs(seen)) {
      if (this.stacked) this.stack(at, run, x, y, theme);
      else this.lines(at, run, x, y, theme);
    }
    at.fillStyle = theme("muted");
    at.font = "10px system-ui, sans-serif";
    at.textBaseline = "top";
    at.fillText(short(most), 1, 0);
  }

  stack(at, run, x, y, theme) {
    let below = run.map(() => 0);
    this.series.forEach((each, i) => {
      const above = run.map((point, n) => below[n] + point.values[i]);
      at.fillStyle = theme(each.color);
      at.beginPath();
      run.forEach((point, n) => (n ? at.lineTo(x(point.at), y(above[n])) : at.moveTo(x(point.at), y(above[n]))));
      for (let n = run.length - 1; n >= 0; n--) at.lineTo(x(run[n].at), y(below[n]));
      at.fill();
      below = above;
    });
  }

  lines(at, run, x, y, theme) {
    this.series.forEach((each, i) => {
      at.strokeStyle = theme(each.color);
      at.lineWidth = 1.5;
      at.setLineDash(each.dash || []);
      at.beginPath();
      run.forEach((point, n) => (n ? at.lineTo(x(point.at), y(point.values[i])) : at.moveTo(x(point.at), y(point.values[i]))));
      at.stroke();
    });
    at.setLineDash([]);
  }
}

function runs(points) {
  const out = [];
  let run = null;
  for (const point of points) {
    if (point.gap || !run) { run = []; out.push(run); }
    if (point.values) run.push(point);
  }
  return out.filter((each) => each.length > 1);
}

function nice(value) {
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((by) => by * step).find((each) => each >= value);
}
