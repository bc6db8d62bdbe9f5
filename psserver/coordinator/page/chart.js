// A line over time as SVG: axes, and values by pointer or keyboard.

import { mark, measured, minute, time, UNKNOWN } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const MARK_COUNT_MAX = 16;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };
const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

function shape(parent, name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

/** The step of an axis with about so many marks: 1, 2 or 5 times a power of ten. */
export function niceStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

/**
 * The ends of an axis that shows all values, and its marks; `fromZero` has it begin at 0.
 *
 * Values may be any that scripts log: so large that a step does not change them, or so far
 * apart that there is no number for that. Then only the ends are marked.
 */
export function axis(values, fromZero) {
  let low = fromZero ? 0 : Math.min(...values);
  let high = Math.max(...values);
  if (!(high > low)) {
    const around = Math.abs(high) || 1;
    [low, high] = fromZero ? [0, around] : [low - around / 2, high + around / 2];
  }
  const step = niceStep(high - low, 4);
  const [first, last] = [Math.floor(low / step), Math.ceil(high / step)];
  if (!(last - first > 0 && last - first <= MARK_COUNT_MAX && low + step > low && high - step < high)) {
    return { low, high, marks: [low, high] };
  }
  const marks = Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
  return { low: marks[0], high: marks.at(-1), marks };
}

export class Chart {
  /**
   * @param {HTMLElement} figure Has a `.plot` and a `.readout`.
   * @param {{fromZero: boolean}} options Whether the axis begins at 0.
   */
  constructor(figure, { fromZero }) {
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    this.fromZero = fromZero;
    this.name = "";
    this.points = [];
    this.chosen = null; // the time of the value that is shown; null for the newest
    const { plot } = this;
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-orientation", "horizontal");
    this.svg = shape(plot, "svg", { "aria-hidden": "true", height: HEIGHT });
    this.grid = shape(this.svg, "g", { class: "grid" });
    this.line = shape(this.svg, "path", { class: "line" });
    this.cursor = shape(this.svg, "line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.dot = shape(this.svg, "circle", { class: "dot", r: 3.5 });
    this.empty = shape(this.svg, "text", { class: "empty", "text-anchor": "middle", y: HEIGHT / 2 });
    new ResizeObserver(() => this.draw()).observe(plot);
    plot.addEventListener("pointermove", (event) => this.pointAt(event));
    plot.addEventListener("pointerdown", (event) => this.pointAt(event));
    plot.addEventListener("pointerleave", () => this.choose(null));
    plot.addEventListener("keydown", (event) => this.press(event));
  }

  /** Shows points `{at, clock, value}` in the order of time; a value may be null. */
  update(name, unit, points) {
    this.name = name;
    this.unit = unit;
    this.points = points.filter((point) => Number.isFinite(point.value));
    this.draw();
  }

  index() {
    if (this.chosen === null) return this.points.length - 1;
    const at = this.points.findIndex((point) => point.at >= this.chosen);
    return at < 0 ? this.points.length - 1 : at;
  }

  choose(index) {
    this.chosen = index === null || index >= this.points.length - 1 ? null : this.points[index].at;
    this.show();
  }

  press(event) {
    const last = this.points.length - 1;
    const at = this.index();
    const far = Math.max(1, Math.round(last / 10));
    const target = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - far, PageUp: at + far, Home: 0, End: last, Escape: last,
    }[event.key];
    if (target === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.min(last, Math.max(0, target)));
  }

  pointAt(event) {
    if (!this.points.length) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    let nearest = 0;
    this.points.forEach((point, index) => {
      if (Math.abs(this.x(point.at) - x) < Math.abs(this.x(this.points[nearest].at) - x)) nearest = index;
    });
    this.choose(nearest);
  }

  x(at) {
    const first = this.points[0].at;
    const span = Math.max(1, this.points.at(-1).at - first);
    return MARGIN.left + ((at - first) / span) * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    const { low, high } = this.scale;
    // Halves: the distance of two numbers may be none.
    const share = (value / 2 - low / 2) / (high / 2 - low / 2) || 0;
    return HEIGHT - MARGIN.bottom - share * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    this.svg.setAttribute("width", this.width);
    this.grid.replaceChildren();
    const isEmpty = !this.points.length;
    for (const part of [this.line, this.cursor, this.dot]) part.toggleAttribute("hidden", isEmpty);
    this.empty.textContent = isEmpty ? "no values yet" : "";
    this.empty.setAttribute("x", this.width / 2);
    if (!isEmpty) {
      this.scale = axis(this.points.map((point) => point.value), this.fromZero);
      this.drawGrid();
      this.line.setAttribute("d", this.points.map((point, index) =>
        `${index ? "L" : "M"}${this.x(point.at).toFixed(1)} ${this.y(point.value).toFixed(1)}`).join(""));
    }
    this.show();
  }

  drawGrid() {
    const right = this.width - MARGIN.right;
    for (const value of this.scale.marks) {
      const y = this.y(value);
      shape(this.grid, "line", { x1: MARGIN.left, x2: right, y1: y, y2: y });
      const label = shape(this.grid, "text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" });
      label.textContent = mark(value);
    }
    const [first, last] = [this.points[0].at, this.points.at(-1).at];
    const stepS = TIME_STEPS_S.find((each) => (last - first) / each <= this.width / 90) ?? 86400 * Math.ceil((last - first) / 86400 / 6);
    for (let at = Math.ceil(first / stepS) * stepS; at <= last; at += stepS) {
      const x = this.x(at);
      shape(this.grid, "line", { x1: x, x2: x, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 });
      if (x < MARGIN.left + 16 || x > right - 16) continue;
      const label = shape(this.grid, "text", { x, y: HEIGHT - 6, "text-anchor": "middle" });
      label.textContent = stepS < 60 ? time(at) : minute(at);
    }
  }

  /** Shows the chosen value: as a mark, in words, and to a screen reader as the slider's. */
  show() {
    const { plot } = this;
    plot.setAttribute("aria-label", `${this.name} over time`);
    plot.setAttribute("aria-valuemin", 0);
    plot.setAttribute("aria-valuemax", Math.max(0, this.points.length - 1));
    const index = this.index();
    plot.setAttribute("aria-valuenow", Math.max(0, index));
    if (index < 0) {
      this.readout.textContent = UNKNOWN;
      plot.setAttribute("aria-valuetext", "no values yet");
      return;
    }
    const point = this.points[index];
    const value = `${measured(point.value)}${this.unit}`;
    const when = this.chosen === null ? "now" : `at ${time(point.at)}, clock ${point.clock ?? UNKNOWN}`;
    this.readout.textContent = `${value} ${when}`;
    plot.setAttribute("aria-valuetext", `${value} ${when}`);
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(point.at));
    this.cursor.toggleAttribute("hidden", this.chosen === null);
    this.dot.setAttribute("cx", this.x(point.at));
    this.dot.setAttribute("cy", this.y(point.value));
  }
}
