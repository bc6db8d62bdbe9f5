// All workers as tiles in groups: one list with one stop of the tab key, in which arrow
// keys move. The worker of the chosen tile is shown in full below.

import { figures, keyed, make, setText } from "./dom.js";
import { duration, UNKNOWN } from "./words.js";

const FEW_WORKERS = 24; // whose tiles have room for their whole names
const ORDER_MS = 4000; // tiles stay where they are for so long, and while in use

export class Strip {
  /**
   * @param {HTMLElement} list Has role listbox.
   * @param {HTMLElement} detail Where the chosen worker is shown.
   * @param {Function} describe The names and values of a worker and its group.
   */
  constructor(list, detail, describe) {
    Object.assign(this, { list, detail, describe });
    this.chosen = "";
    this.workers = new Map();
    this.places = new Map();
    this.wish = "";
    this.orderedAt = -Infinity;
    this.isHeld = false;
    list.addEventListener("pointerenter", () => { this.isHeld = true; });
    list.addEventListener("pointerleave", () => { this.isHeld = false; });
    list.addEventListener("click", (event) => {
      const tile = event.target.closest("[role=option]");
      if (tile) this.choose(tile.dataset.key === this.chosen ? "" : tile.dataset.key);
    });
    list.addEventListener("keydown", (event) => this.press(event));
  }

  tiles() {
    return [...this.list.querySelectorAll("[role=option]")];
  }

  /** Keeps workers of a group where they were, unless they may be ordered again. */
  settle(groups, wish) {
    const isInUse = this.isHeld || this.list.contains(document.activeElement);
    const now = performance.now();
    if (wish !== this.wish || (!isInUse && now - this.orderedAt >= ORDER_MS)) {
      this.wish = wish;
      this.orderedAt = now;
      this.places = new Map(groups.flatMap((group) => group.workers).map((worker, place) => [keyOf(worker), place]));
    }
    const place = (worker) => this.places.get(keyOf(worker)) ?? Infinity;
    for (const group of groups) group.workers.sort((a, b) => Math.sign(place(a) - place(b)) || 0);
    return groups;
  }

  /**
   * @param {{name: string, title: string, tone: string, workers: object[]}[]} groups
   * @param {Function} ownMs A worker's own time of a step, null if unknown.
   * @param {number} lagMax The completed clocks that members may be apart, at least 1.
   */
  update(groups, ownMs, lagMax) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const workers = groups.flatMap((group) => group.workers);
    const ownMax = Math.max(...workers.map((worker) => ownMs(worker) ?? 0));
    const isFew = workers.length <= FEW_WORKERS;
    const prefix = isFew ? "" : commonPrefix(workers.map((worker) => worker.worker_id));
    this.list.classList.toggle("few", isFew);
    this.workers = new Map(groups.flatMap((group) => group.workers.map((worker) => [keyOf(worker), [worker, group]])));
    keyed(this.list, groups, (group) => group.name, (group) =>
      make("div", { role: "group" }, make("p", { "aria-hidden": "true" }), make("div", { class: "tiles" })),
    (box, group) => {
      setText(box.firstElementChild, `${group.title} · ${group.workers.length}`);
      box.setAttribute("aria-label", group.title);
      box.dataset.tone = group.tone;
      keyed(box.lastElementChild, group.workers, keyOf, () =>
        make("div", { role: "option", tabindex: "-1", "aria-selected": "false" }, make("bdi"), make("b"), make("i")),
      (tile, worker) => fillTile(tile, worker, {
        title: group.title, prefix, ownMs: ownMs(worker), ownMax, lagMax,
      }));
    });
    this.showChosen();
    if (focused !== null && document.activeElement?.dataset.key !== focused) {
      this.tiles().find((tile) => tile.dataset.key === focused)?.focus();
    }
  }

  press(event) {
    const tiles = this.tiles();
    const at = tiles.indexOf(document.activeElement);
    const moves = {
      ArrowRight: () => tiles[at + 1], ArrowLeft: () => tiles[at - 1],
      ArrowDown: () => across(tiles, tiles[at], 1), ArrowUp: () => across(tiles, tiles[at], -1),
      Home: () => tiles[0], End: () => tiles.at(-1), Enter: () => tiles[at], " ": () => tiles[at],
    };
    if (at < 0 || !(event.key in moves || event.key === "Escape")) return;
    event.preventDefault();
    if (event.key === "Escape") return this.choose("");
    const target = moves[event.key]();
    if (!target) return;
    this.choose(target.dataset.key);
    target.focus();
  }

  choose(key) {
    this.chosen = key;
    this.showChosen();
  }

  showChosen() {
    const chosen = this.workers.get(this.chosen);
    const tiles = this.tiles();
    const stop = tiles.find((tile) => tile.dataset.key === this.chosen)
      ?? tiles.find((tile) => tile === document.activeElement) ?? tiles[0];
    for (const tile of tiles) {
      tile.setAttribute("aria-selected", String(tile.dataset.key === this.chosen));
      tile.tabIndex = tile === stop ? 0 : -1;
    }
    this.detail.hidden = chosen === undefined;
    if (chosen !== undefined) figures(this.detail, this.describe(...chosen));
  }
}

export const keyOf = (worker) => `${worker.incarnation}/${worker.worker_id}`;

/** What all names begin with, up to a character such as `-`. */
function commonPrefix(names) {
  let length = 0;
  while (names.every((name) => name[length] !== undefined && name[length] === names[0][length])) length += 1;
  return names[0].slice(0, length).match(/^.*[-_./:]/)?.[0] ?? "";
}

function fillTile(tile, worker, { title, prefix, ownMs, ownMax, lagMax }) {
  const [name, behind, bar] = tile.children;
  const { lag } = worker;
  setText(name, worker.worker_id.slice(prefix.length) || worker.worker_id);
  setText(behind, lag === null ? UNKNOWN : lag ? `−${lag}` : "0");
  tile.style.setProperty("--behind", Math.min(1, (lag ?? 0) / lagMax).toFixed(3));
  bar.style.width = `${ownMax > 0 ? ((100 * (ownMs ?? 0)) / ownMax).toFixed(1) : 0}%`;
  const words = `${worker.worker_id}, ${title.toLowerCase()}, ${lag === null ? "no clock" : `${lag} behind`}, own time ${duration(ownMs)}`;
  if (tile.title === words) return;
  tile.title = words;
  tile.setAttribute("aria-label", words);
}

/** The tile in the next row (1) or the one before (-1) that is nearest to one. */
function across(tiles, tile, direction) {
  const here = tile.getBoundingClientRect();
  const others = tiles.map((each) => ({ each, box: each.getBoundingClientRect() }))
    .map(({ each, box }) => ({ each, rows: (box.top - here.top) * direction, columns: Math.abs(box.left - here.left) }))
    .filter(({ rows }) => rows > 1);
  const row = Math.min(...others.map(({ rows }) => rows));
  return others.filter(({ rows }) => rows < row + 1).sort((a, b) => a.columns - b.columns)[0]?.each;
}
