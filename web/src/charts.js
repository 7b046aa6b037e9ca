// uPlot in the page's colours: lines over the last minute, and bars over named places.

import uPlot from "uplot";
import { byId, colour, digits } from "./dom.js";

export const SECONDS = 60; // that lines show
const HEIGHT = 132;
const font = "11px system-ui, sans-serif";
const plots = new Set();

function axis(extra) {
  return {
    stroke: () => colour("--dim"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { show: false },
    font,
    gap: 4,
    ...extra,
  };
}

function plotIn(element, options, data) {
  const width = Math.max(120, element.clientWidth);
  const base = { width, height: HEIGHT, legend: { show: false }, cursor: { show: false }, padding: [10, 16, 0, 0] };
  const plot = new uPlot({ ...base, ...options }, data, element);
  new ResizeObserver(() => {
    if (element.clientWidth) plot.setSize({ width: element.clientWidth, height: HEIGHT });
  }).observe(element);
  plots.add(plot);
  return plot;
}

export function redrawCharts() {
  for (const plot of plots) plot.redraw();
}

// Lines over time. `series`: [label, colour]; `most` fixes the top of the scale.
export class Lines {
  constructor(id, series, { most = null, unit = "" } = {}) {
    const top = (low, high) => [0, most ?? Math.max(1, high * 1.15)];
    this.plot = plotIn(byId(id), {
      series: [{}, ...series.map(([label, name]) => ({ label, stroke: () => colour(name), width: 1.75, points: { show: false }, fill: series.length === 1 ? () => colour(name, 0.13) : undefined }))],
      scales: {
        x: { time: false, range: () => [-SECONDS, 0] },
        y: { range: (u, low, high) => top(low, high) },
      },
      axes: [
        axis({ size: 22, values: (u, splits) => splits.map((s) => (s ? `${s} s` : "now")) }),
        axis({ size: 42, values: (u, splits) => splits.map((v) => `${digits(v)}${unit}`) }),
      ],
      legend: { show: series.length > 1, live: false },
    }, [[], ...series.map(() => [])]);
  }

  show(data) {
    this.plot.setData(data);
  }
}

// Bars at places 0, 1, 2 ... with a name below each.
export class Bars {
  #names = [];

  constructor(id, name, { most = null, unit = "" } = {}) {
    this.element = byId(id);
    this.plot = plotIn(this.element, {
      series: [{}, { stroke: () => colour(name), fill: () => colour(name), paths: uPlot.paths.bars({ size: [0.8, 60], radius: 0.12 }), points: { show: false } }],
      scales: {
        x: { time: false, range: () => [-0.6, Math.max(1, this.#count) - 0.4] },
        y: { range: (u, low, high) => [0, most ?? Math.max(1, high * 1.1)] },
      },
      axes: [
        axis({
          size: 22,
          grid: { show: false },
          splits: () => this.#splits(),
          values: (u, splits) => splits.map((i) => this.#names[i] ?? ""),
        }),
        axis({ size: 42, values: (u, splits) => splits.map((v) => (Number.isInteger(v) ? `${digits(v)}${unit}` : "")) }),
      ],
    }, [[], []]);
  }

  get #count() {
    return this.plot?.data[0].length ?? 0;
  }

  // Names that would touch are left out.
  #splits() {
    const room = Math.max(1, Math.floor((this.element.clientWidth - 50) / 56)); // without the scale
    const every = Math.ceil(this.#count / room) || 1;
    return [...Array(this.#count).keys()].filter((i) => i % every === 0);
  }

  show(names, values) {
    this.#names = names;
    this.plot.setData([values.map((_, i) => i), values]);
  }
}
