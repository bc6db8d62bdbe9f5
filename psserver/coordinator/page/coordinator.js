// What the coordinator has answered: the job's status, its history and its events.

const ANSWER_TIMEOUT_MS = 10_000;
const EVENT_COUNT_MAX = 1000;
const POINT_COUNT_MAX = 1024;

/** A request that the coordinator has answered by an error. */
export class Refused extends Error {
  constructor(code, text) {
    super(text);
    this.code = code;
  }
}

/** A text without invisible characters, some of which change how others are shown. */
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) =>
    `\\u{${character.codePointAt(0).toString(16)}}`);
}

function reviver(key, value) {
  if (typeof value === "string") return visible(value);
  if (key !== "metrics" || typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [visible(name), each]));
}

export class Coordinator {
  constructor() {
    this.token = ""; // only here: it is gone with the page
    this.status = null;
    this.answeredAtMs = 0;
    this.forget();
  }

  /** Forgets what was of an earlier job at this address. */
  forget() {
    this.points = [];
    this.events = [];
    this.lastNumber = 0;
    this.historyDueMs = 0;
    this.traffic = new Map();
  }

  /**
   * Returns the JSON that a path answers.
   *
   * Throws `Refused`, or what `fetch` throws when nobody answers in time.
   */
  async ask(path, { method = "GET", body, timeoutMs = ANSWER_TIMEOUT_MS } = {}) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method, headers, body: JSON.stringify(body), cache: "no-store", credentials: "omit",
      redirect: "error", signal: AbortSignal.timeout(timeoutMs),
    });
    const text = await response.text();
    if (response.ok) return JSON.parse(text, reviver);
    let reason = `answer ${response.status}`;
    try {
      reason = JSON.parse(text, reviver).error ?? reason;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error; // else it comes from a proxy
    }
    throw new Refused(response.status, reason);
  }

  /** Asks for all that may have changed. */
  async poll() {
    const status = await this.ask("status");
    if (this.status !== null && status.job.job_id !== this.status.job.job_id) this.forget();
    this.status = status;
    this.answeredAtMs = Date.now();
    this.noteTraffic();
    const { events } = await this.ask(`events?after=${this.lastNumber}`);
    this.events = [...this.events, ...events].slice(-EVENT_COUNT_MAX);
    this.lastNumber = this.events.at(-1)?.number ?? 0;
    const now = performance.now();
    if (now < this.historyDueMs) return;
    const { interval_s: intervalS, points } = await this.ask("history");
    this.historyDueMs = now + intervalS * 500;
    // One that was started again knows only what came since.
    const firstAt = points[0]?.at_unix_s ?? Infinity;
    const older = this.points.filter((point) => point.at_unix_s < firstAt);
    this.points = [...older, ...points].slice(-POINT_COUNT_MAX);
  }

  /** Bytes per second that a shard receives and sends, null before they are known. */
  rates(shard) {
    return this.traffic.get(shard.shard_index)?.rates ?? [null, null];
  }

  noteTraffic() {
    const now = performance.now();
    const counts = ({ received_bytes: received, sent_bytes: sent }) => [received, sent];
    for (const shard of this.status.shards) {
      const before = this.traffic.get(shard.shard_index);
      if (before?.incarnation !== shard.incarnation) {
        this.traffic.set(shard.shard_index, { ...shard, at: now, rates: [null, null] });
        continue;
      }
      // A shard reports less often than this page asks: the same counts say nothing yet.
      const isSame = counts(shard).join() === counts(before).join();
      if (isSame && now - before.at < 3000) continue;
      const rates = counts(shard).map((count, index) =>
        Math.max(0, count - counts(before)[index]) / ((now - before.at) / 1000));
      this.traffic.set(shard.shard_index, { ...shard, at: now, rates });
    }
  }
}
