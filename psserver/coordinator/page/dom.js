// What is put into the page: text, never markup; and only where something has changed.

export const $ = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Has a parent hold one child for each item, in order, and keeps those that it has. */
export function keyed(parent, items, keyOf, create, update = () => {}) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const kept = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = old.get(key) ?? create(item);
    child.dataset.key = key;
    old.delete(key);
    kept.add(child);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  // Not those of `old` alone: names of clients may look the same.
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
}

/** Fills a `dl` with names and values: `[name, value, note]`. */
export function figures(list, entries) {
  keyed(list, entries, ([name]) => name, ([name]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, make("bdi"), make("small"))),
  (child, [, value, note]) => {
    setText(child.querySelector("bdi"), value);
    setText(child.querySelector("small"), note ?? "");
  });
}

/** Fills a bar with parts `[kind, value, text]` of a total, and says them in words. */
export function fillBar(bar, parts, total) {
  keyed(bar, parts, ([kind]) => kind, ([kind]) => make("span", { class: kind }), (child, [, value]) => {
    const share = total > 0 ? Math.min(100, (Math.max(0, value ?? 0) / total) * 100) : 0;
    child.style.width = `${share.toFixed(2)}%`;
  });
  const text = parts.filter(([, value]) => value).map(([, , words]) => words).join(", ");
  if (bar.title !== text) bar.title = text;
  return text;
}

const CELLS = {
  name: () => make("th", { scope: "row" }, make("bdi")),
  text: () => make("td", { class: "wide" }, make("bdi")),
  bar: () => make("td", { class: "wide" }, make("span", { class: "of-bar" }),
    make("span", { class: "bar", "aria-hidden": "true" }), make("span", { class: "unseen" })),
};

/** Makes a row of cells: `name`, `text`, `bar`, or the class of a plain one. */
export function makeRow(kinds) {
  return make("tr", {}, ...kinds.map((kind) => CELLS[kind]?.() ?? make("td", { class: kind }, make("bdi"))));
}

/** Fills a row: a text for each cell, `[text, parts, total]` for a bar. */
export function fillRow(made, values) {
  values.forEach((value, index) => {
    const cell = made.children[index];
    if (!Array.isArray(value)) return setText(cell.firstElementChild, value);
    const [text, parts, total] = value;
    setText(cell.firstElementChild, text);
    setText(cell.lastElementChild, fillBar(cell.children[1], parts, total));
  });
}
