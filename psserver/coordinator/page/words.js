// Numbers, sizes, durations and times as people read them. Unknown is an en dash.

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const MARK = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "compact" });
const CLOCK_TIME = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const TIME = new Intl.DateTimeFormat("en", { ...CLOCK_TIME, second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat("en", CLOCK_TIME);
const DATE = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", ...CLOCK_TIME });

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

export function whole(value) {
  return isKnown(value) ? WHOLE.format(value) : UNKNOWN;
}

/** With three digits, as many for each value, so that columns don't dance. */
export function measured(value) {
  if (!isKnown(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 100 && size < 1e9) return WHOLE.format(value);
  return size && (size < 1e-4 || size >= 1e9) ? value.toExponential(2) : value.toPrecision(3);
}

/** A mark of an axis. */
export function mark(value) {
  const size = Math.abs(value);
  return size && (size < 1e-4 || size >= 1e15) ? value.toExponential(1) : MARK.format(value);
}

export function bytes(count) {
  if (!isKnown(count)) return UNKNOWN;
  let unit = 0;
  for (; count >= 1024 && unit < 4; unit += 1) count /= 1024;
  return `${unit ? count.toFixed(1) : WHOLE.format(count)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function duration(ms) {
  if (!isKnown(ms)) return UNKNOWN;
  if (!ms) return "0 s";
  if (ms < 1000) return `${ms < 100 ? ms.toFixed(1) : WHOLE.format(ms)} ms`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 60) return ms < 10_000 ? `${(ms / 1000).toFixed(1)} s` : `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  const minutes = Math.floor(seconds / 60);
  return `${WHOLE.format(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** Time of day; with the date when it was on another day. */
export function time(unixS) {
  const date = new Date(unixS * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return (isToday ? TIME : DATE).format(date);
}

export function minute(unixS) {
  return MINUTE.format(new Date(unixS * 1000));
}

export function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}
