// The page of a job. It asks the coordinator once a second and shows what it answers.
//
// Names of workers, loaders and metrics come from clients. They are put in as text alone
// (`textContent`, `setAttribute`), never as markup, and the policy that the page is served
// with (Content-Security-Policy, with Trusted Types) refuses anything else.

import { Actions } from "./actions.js";
import { Chart } from "./chart.js";
import { Coordinator, Refused } from "./coordinator.js";
import { $, figures, fillBar, fillRow, keyed, make, makeRow, setText } from "./dom.js";
import { keyOf, Strip } from "./strip.js";
import { bytes, counted, duration, measured, time, UNKNOWN, whole } from "./words.js";

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 60_000;
const FEW_WORKERS = 12;
const FEW_EVENTS = 20;
const FEW_EPOCHS = 4;

// Of a diagnosis: its title, and how serious it is.
const CAUSES = new Map([
  ["starting", ["Starting", "wait"]],
  ["too_few_workers", ["Too few workers", "wait"]],
  ["straggler", ["Straggler", "slow"]],
  ["slow_link", ["Slow link", "slow"]],
  ["waiting_for_data", ["Waiting for data", "slow"]],
  ["short_epochs", ["Short epochs", "slow"]],
  ["disk", ["Disk", "bad"]],
  ["worker_lost", ["Worker lost", "bad"]],
  ["shard_lost", ["Shard lost", "bad"]],
  ["checkpoint_failing", ["Checkpoints fail", "bad"]],
  ["training", ["Training", "good"]],
  ["finished", ["Finished", "good"]],
  ["failed", ["Failed", "bad"]],
]);

const GROUPS = new Map([
  ["awaited", ["Waited for", "slow"]],
  ["slow", ["Slow", "slow"]],
  ["lost", ["Lost", "bad"]],
  ["suspect", ["Suspect", "bad"]],
  ["leaving", ["Leaving", "wait"]],
  ["joining", ["Joining", "wait"]],
  ["registered", ["Registered", "wait"]],
  ["member", ["Training", "good"]],
]);

const LOSS = /^(worker_(suspect|lost|evicted|replaced)|shard_lost|checkpoint_failed|recording_ended|job_(failed|rewound))$/;
const GAIN = /_(joined|returned|complete|finished|started|registered)$/;
const EVENT_FILTERS = {
  "": /./, loss: LOSS, worker: /^worker_/, shard: /^(shard|recording)_/, checkpoint: /^checkpoint_/,
  job: /^(job|mode|coordinator)_/,
};

const coordinator = new Coordinator();
const metricChart = new Chart($("metric-chart"), { fromZero: false });
const rateChart = new Chart($("rate-chart"), { fromZero: true });
const strip = new Strip($("strip"), $("worker-detail"), workerFigures);
let showsAllWorkers = false;
let showsAllEvents = false;

// The job

function show(status) {
  showSentence(status);
  showStrategy(status);
  showFigures(status);
  showCharts(status);
  showWorkers(status);
  showStaleness(status);
  showShards(status);
  showEpochs(status);
  showCheckpoints(status);
  showEvents();
}

function showSentence({ diagnosis, job, phase, waiting_for: waitingFor }) {
  const [title, tone] = CAUSES.get(diagnosis.cause) ?? [diagnosis.cause ?? "Not known", "wait"];
  const sentence = diagnosis.sentence ?? waitingFor ?? `The job is ${phase}.`;
  document.title = `${title} · ${job.job_id} · paramserver`;
  setText($("job-id"), job.job_id);
  $("now").dataset.tone = tone;
  setText($("cause"), title);
  setText($("sentence"), sentence);
  // A screen reader says it again when it is about something else, not for each number.
  speak(`${title}. ${sentence}`, `${diagnosis.cause} ${diagnosis.who.join()} ${sentence.replace(/\d/g, "")}`);
}

function showStrategy({ strategy }) {
  $("strategy").hidden = !strategy;
  setText($("strategy"), strategy ? `Strategy: ${strategy}` : "");
}

let spoken = "";

function speak(text, subject = text) {
  if (subject === spoken) return;
  spoken = subject;
  setText($("spoken"), text);
}

function showFigures(status) {
  const clocks = status.workers.map((worker) => worker.clock).filter((clock) => clock !== null);
  const [slowest, fastest] = [Math.min(...clocks), Math.max(...clocks)];
  const metrics = Object.entries(status.metrics ?? {});
  const [metric, value] = metrics.find(([name]) => name === "loss") ?? metrics[0] ?? ["loss", null];
  const ahead = fastest > slowest ? `the fastest +${whole(fastest - slowest)}` : "";
  figures($("figures"), [
    ["Clock", clocks.length ? whole(slowest) : UNKNOWN, ahead],
    ["Steps/s", measured(status.steps_per_s)],
    ["Samples/s", measured(status.samples_per_s)],
    [metric === "loss" ? "Loss" : metric, measured(value)],
    ["Workers", whole(clocks.length), `at least ${status.job.workers_min}`],
    ["Mode", status.mode, status.staleness_bound ? `${status.staleness_bound} clocks apart`
      : status.quorum ? `of ${status.quorum}${status.grace_window_s ? `, ${status.grace_window_s} s for more` : ""}` : ""],
    ["Training for", duration(status.elapsed_s === null ? null : status.elapsed_s * 1000)],
    ["Model", bytes(status.parameter_bytes), counted(status.tensor_count, "tensor")],
  ]);
}

function showCharts({ metrics }) {
  const { points } = coordinator;
  const names = new Set([{ metrics }, ...points].flatMap((point) => Object.keys(point.metrics ?? {})));
  const sorted = [...names].sort((a, b) => (b === "loss") - (a === "loss") || byName.compare(a, b));
  const select = $("metric-name");
  keyed(select, sorted.length ? sorted : ["loss"], String, (name) => make("option", { value: name }, name));
  const line = (valueOf) => points.map((point) =>
    ({ at: point.at_unix_s, clock: point.clock, value: valueOf(point) }));
  metricChart.update(select.value, "", line((point) => point.metrics?.[select.value]));
  const rate = $("rate-name");
  const unit = rate.selectedOptions[0].text;
  rateChart.update(unit, ` ${unit}`, line((point) => point[rate.value]));
}

// Workers

const byName = new Intl.Collator("en", { numeric: true });

/** Of the wait for answers, what others have to do with, in ms; null if it is not known. */
function othersMs({ answer_wait_ms: wait, peer_wait_ms: others }) {
  // Each is a mean over steps of its own, so that they may differ by a little.
  return others === null ? null : Math.min(wait ?? 0, others);
}

/** Time of a whole step, in ms; null if it is not known. */
function stepMs({ compute_ms: compute, data_wait_ms: load, send_ms: send, answer_wait_ms: wait }) {
  const known = [compute, load, send, wait].filter((ms) => ms !== null);
  return known.length ? known.reduce((sum, ms) => sum + ms) : null;
}

/** What of it is the worker's own: it waits for no other worker. */
function ownMs(worker) {
  const step = stepMs(worker);
  return step === null ? null : step - othersMs(worker);
}

function stepParts(worker) {
  const { answer_wait_ms: wait } = worker;
  const others = othersMs(worker);
  return [
    ["compute", worker.compute_ms, "computing"],
    ["data", worker.data_wait_ms, "waiting for data"],
    ["send", worker.send_ms, "sending"],
    ["answer", wait === null ? null : wait - others, "waiting for answers"],
    ["others", others, "waiting for other workers"],
  ];
}

const stepBar = (worker) => stepParts(worker).map(([kind, ms, text]) => [kind, ms, `${text} ${duration(ms)}`]);

/** Workers that the filter leaves, by group, each sorted as asked. */
function groupsOf({ diagnosis, shards, workers }) {
  const awaited = new Set(shards.flatMap((shard) => shard.waiting?.awaited.map(({ name }) => name) ?? []));
  if (diagnosis.others_wait) diagnosis.who.forEach((name) => awaited.add(name));
  const slow = new Set(CAUSES.get(diagnosis.cause)?.[1] === "slow" ? diagnosis.who : []);
  const nameOf = ({ worker_id: name, state }) => awaited.has(name) ? "awaited"
    : state === "member" && slow.has(name) ? "slow" : state;
  const wanted = $("worker-filter").value.trim().toLowerCase();
  const isWanted = (worker) => [worker.worker_id, worker.state, GROUPS.get(nameOf(worker))?.[0] ?? ""]
    .some((text) => text.toLowerCase().includes(wanted));
  const size = {
    behind: (worker) => worker.lag ?? -1,
    own: (worker) => ownMs(worker) ?? -1,
    name: () => 0,
  }[$("worker-sort").value];
  const sorted = workers.filter(isWanted)
    .sort((a, b) => size(b) - size(a) || byName.compare(a.worker_id, b.worker_id));
  return [...GROUPS].map(([name, [title, tone]]) =>
    ({ name, title, tone, workers: sorted.filter((worker) => nameOf(worker) === name) }))
    .filter((group) => group.workers.length);
}

function showWorkers(status) {
  const wish = `${$("worker-sort").value} ${$("worker-filter").value}`;
  const groups = strip.settle(groupsOf(status), wish);
  const rows = groups.flatMap((group) => group.workers.map((worker) => ({ worker, group })));
  const total = status.workers.length;
  setText($("worker-count"), rows.length === total ? whole(total) : `${whole(rows.length)} of ${whole(total)}`);
  setText($("no-workers"), total ? "No worker has this name or state." : "No worker is here.");
  $("no-workers").hidden = rows.length > 0;
  $("worker-table").parentElement.hidden = $("strip-legend").hidden = rows.length === 0;
  strip.update(groups, ownMs, Math.max(1, status.staleness_bound ?? 0, ...status.workers.map(({ lag }) => lag ?? 0)));
  const shown = showsAllWorkers ? rows : rows.slice(0, FEW_WORKERS);
  const longestMs = Math.max(...rows.map(({ worker }) => stepMs(worker) ?? 0));
  const kinds = ["name", "state", "number", "number", "number", "bar", "number", "number"];
  keyed($("worker-table").tBodies[0], shown, ({ worker }) => keyOf(worker), () => makeRow(kinds), (made, { worker, group }) => {
    made.children[1].dataset.tone = group.tone;
    fillRow(made, [
      worker.worker_id,
      group.title.toLowerCase(),
      whole(worker.clock),
      whole(worker.lag),
      measured(worker.steps_per_s),
      [duration(stepMs(worker)), stepBar(worker), longestMs],
      measured(worker.loss),
      bytes(worker.resident_bytes),
    ]);
  });
  fillMore($("worker-more"), rows.length, FEW_WORKERS, showsAllWorkers, "workers");
}

function workerFigures(worker, group) {
  const { step_count: steps, sample_count: samples, silent_ms: silentMs } = worker;
  return [
    ["Worker", worker.worker_id, `start ${worker.incarnation}`],
    ["State", group.title.toLowerCase(), worker.rank === null ? "" : `rank ${worker.rank}`],
    ["Clock", whole(worker.clock), worker.lag === null ? "" : `${worker.lag} behind the fastest`],
    ["In this step for", duration(worker.step_ms), worker.activity ?? ""],
    ...stepParts(worker).map(([, ms, text]) => [text[0].toUpperCase() + text.slice(1), duration(ms), "of a step"]),
    ["Steps", whole(steps), `${measured(worker.steps_per_s)}/s`],
    ["Samples", whole(samples), `${measured(worker.samples_per_s)}/s`],
    ...(worker.round_step_count === null ? [] : [["Round", whole(worker.round_step_count), "local steps"]]),
    ...(worker.steps_since_push === null ? [] : [["Since its push", whole(worker.steps_since_push), "local steps"]]),
    ...(worker.fragment_under_way === null ? [] : [["Pushing part", whole(worker.fragment_under_way), "of the model"]]),
    ["Sent", bytes(worker.sent_bytes)],
    ["Received", bytes(worker.received_bytes)],
    ["Memory", bytes(worker.resident_bytes)],
    ["Address", worker.address ?? UNKNOWN],
    ["Last heard", silentMs === null ? UNKNOWN : silentMs ? `${duration(silentMs)} ago` : "now"],
    ["Cut off from shards", worker.unreached_shards.join(", ") || "none"],
  ];
}

/** How many updates came between a gradient's values and itself: nothing in BSP. */
function showStaleness({ shards }) {
  const counts = [];
  for (const shard of shards) {
    shard.staleness_counts.forEach((count, staleness) => {
      counts[staleness] = (counts[staleness] ?? 0) + count;
    });
  }
  const total = counts.reduce((sum, count) => sum + count, 0);
  $("staleness").hidden = !total;
  if (!total) return;
  const upTo = (share) => {
    let sum = 0;
    return counts.findIndex((count) => (sum += count) >= share * total);
  };
  const largest = counts.length - 1;
  setText($("staleness-text"), `Staleness of gradients, in updates: half at most ${upTo(0.5)}, `
    + `95 % at most ${upTo(0.95)}, the largest ${largest >= 63 ? "63 or more" : largest}.`);
  const most = Math.max(...counts);
  keyed($("staleness-bars"), counts, (_, index) => index, () => make("span"), (bar, count) => {
    bar.style.height = `${((100 * count) / most).toFixed(1)}%`;
  });
}

// Shards, data, checkpoints, events

function showShards({ shards }) {
  setText($("shard-count"), whole(shards.length));
  const held = (shard) => shard.parameter_bytes + shard.optimizer_bytes;
  const memory = (shard) => Math.max(held(shard), shard.resident_bytes ?? 0);
  const largest = Math.max(...shards.map(memory));
  const rate = (perSecond) => (perSecond === null ? UNKNOWN : `${bytes(perSecond)}/s`);
  const kinds = ["name", "state", "number", "number", "number", "number", "number", "number", "bar"];
  keyed($("shard-table").tBodies[0], shards, (shard) => shard.shard_index, () => makeRow(kinds), (made, shard) => {
    const { state, waiting } = shard;
    const [received, sent] = coordinator.rates(shard);
    const isReady = state === "ready";
    made.children[1].dataset.tone = isReady ? (waiting ? "slow" : "good") : state === "missing" ? "wait" : "bad";
    fillRow(made, [
      shard.address === null ? `${shard.shard_index}` : `${shard.shard_index} · ${shard.address}`,
      isReady && waiting ? `waits ${duration(waiting.waited_ms)}` : state,
      whole(shard.clock),
      whole(shard.queued_push_count),
      duration(shard.apply_ms),
      rate(received),
      rate(sent),
      whole(shard.chunk_count),
      [bytes(memory(shard)), [
        ["compute", shard.parameter_bytes, `parameters ${bytes(shard.parameter_bytes)}`],
        ["send", shard.optimizer_bytes, `optimizer ${bytes(shard.optimizer_bytes)}`],
        ["others", memory(shard) - held(shard), `rest of the process ${bytes(memory(shard) - held(shard))}`],
      ], largest],
    ]);
  });
}

function showEpochs({ epochs }) {
  $("no-epochs").hidden = epochs.length > 0;
  $("epoch-keys").hidden = epochs.length === 0;
  const create = () => make("li", {}, make("p", {}, make("bdi"), make("span")),
    make("div", { class: "bar", "aria-hidden": "true" }), make("p", { class: "small" }));
  keyed($("epochs"), epochs.slice(0, FEW_EPOCHS), (epoch) => `${epoch.epoch}/${epoch.loader}`, create, (item, epoch) => {
    const total = epoch.position_count;
    const { held_count: held, seen_once_count: seen } = epoch;
    const left = epoch.never_count + epoch.left_out_count - held;
    const others = [
      ["seen twice", epoch.seen_again_count], ["torn", epoch.torn_count],
      ["dropped", epoch.dropped_count], ["skipped", epoch.skipped_count],
    ].filter(([, count]) => count);
    const done = total - left - held;
    const [head, bar, text] = item.children;
    setText(head.firstElementChild, `${epoch.loader}, epoch ${epoch.epoch}`);
    setText(head.lastElementChild, `${epoch.over ? "over, " : ""}${total ? Math.floor((100 * done) / total) : 0} %`);
    fillBar(bar, [
      ["compute", seen, "seen"], ["data", done - seen, "seen twice, torn, dropped or skipped"],
      ["send", held, "held by workers"], ["left", left, "left"],
    ].map(([kind, count, name]) => [kind, count, `${whole(count)} ${name}`]), total);
    const parts = [["seen", seen], ...others, ["held", held], ["left", left]];
    setText(text, `${parts.map(([name, count]) => `${whole(count)} ${name}`).join(", ")}, of ${whole(total)}`);
  });
}

function showCheckpoints({ checkpoints }) {
  $("no-checkpoints").hidden = checkpoints !== null;
  $("checkpoint-failure").hidden = !checkpoints?.failure;
  setText($("checkpoint-failure"), checkpoints?.failure ? `The last try has failed: ${checkpoints.failure}` : "");
  const newest = checkpoints?.newest ?? null;
  figures($("checkpoint"), checkpoints === null ? [] : [
    ["Newest", newest ? `${duration(newest.age_ms)} ago` : "none yet", newest ? `clock ${whole(newest.clock)}` : ""],
    ["Size", bytes(newest?.byte_count)],
    ["One every", checkpoints.interval.replace("steps", " steps")],
    ["Folder", checkpoints.url, newest?.name],
  ]);
}

function showEvents() {
  const filter = EVENT_FILTERS[$("event-kind").value];
  const wanted = coordinator.events.filter((event) => filter.test(event.kind)).reverse();
  setText($("event-count"), whole(wanted.length));
  $("no-events").hidden = wanted.length > 0;
  $("event-table").parentElement.hidden = wanted.length === 0;
  const shown = showsAllEvents ? wanted : wanted.slice(0, FEW_EVENTS);
  keyed($("event-table").tBodies[0], shown, (event) => event.number, (event) => {
    const { at_unix_s: atS, clock, kind, text } = event;
    const tone = LOSS.test(kind) ? "bad" : GAIN.test(kind) ? "good" : "wait";
    return make("tr", {},
      make("td", {}, make("time", { datetime: new Date(atS * 1000).toISOString() }, time(atS))),
      make("td", { class: "number" }, whole(clock)),
      make("td", { class: "state", "data-tone": tone }, kind.replaceAll("_", " ")),
      make("td", { class: "wide" }, make("bdi", {}, text)));
  });
  fillMore($("event-more"), wanted.length, FEW_EVENTS, showsAllEvents, "events");
}

function fillMore(button, count, few, showsAll, noun) {
  button.hidden = count <= few;
  button.setAttribute("aria-expanded", String(showsAll));
  setText(button, showsAll ? `Show only ${few} ${noun}` : `Show all ${whole(count)} ${noun}`);
}

// The connection

let awaySinceMs = 0;

function showAnswered() {
  setText($("link"), "live");
  $("link").dataset.state = "live";
  $("away").hidden = true;
  document.body.classList.remove("stale");
  awaySinceMs = 0;
}

function showAway(problem) {
  awaySinceMs ||= Date.now();
  setText($("link"), "no answer");
  $("link").dataset.state = "away";
  const shown = coordinator.status === null ? "" : ` What is shown is from ${time(coordinator.answeredAtMs / 1000)}.`;
  setText($("away"), `The coordinator has not answered since ${time(awaySinceMs / 1000)}: ${problem}.`
    + ` This page asks again every second.${shown}`);
  $("away").hidden = false;
  document.body.classList.add("stale");
  speak("The coordinator does not answer.");
}

function showLocked() {
  setText($("link"), "needs a token");
  $("link").dataset.state = "locked";
  $("away").hidden = true;
}

let wakeUp = () => {};
const actions = new Actions(coordinator, () => wakeUp());

function pause(ms) {
  return new Promise((resolve) => {
    wakeUp = resolve;
    setTimeout(resolve, ms);
  });
}

async function look() {
  const { token } = coordinator;
  try {
    await coordinator.poll();
  } catch (error) {
    if (token !== coordinator.token) return; // the answer is for the one before
    if (error instanceof Refused && [401, 403].includes(error.code)) {
      actions.lock(true);
      showLocked();
    } else {
      const isLate = error.name === "TimeoutError";
      showAway(error instanceof Refused ? error.message : isLate ? "it takes too long" : "there is no connection");
    }
    return;
  }
  if (actions.isLocked) actions.lock(false);
  showAnswered();
  show(coordinator.status);
}

async function run() {
  for (;;) {
    const beganMs = performance.now();
    await look();
    const leftMs = POLL_MS - (performance.now() - beganMs);
    // What nobody sees need not be asked for each second.
    await pause(document.hidden ? HIDDEN_POLL_MS : Math.max(100, leftMs));
  }
}

// What its reader chooses

const again = () => coordinator.status !== null && show(coordinator.status);
for (const id of ["metric-name", "rate-name", "worker-sort", "event-kind"]) $(id).addEventListener("change", again);
$("worker-filter").addEventListener("input", again);
$("worker-more").addEventListener("click", () => {
  showsAllWorkers = !showsAllWorkers;
  again();
});
$("event-more").addEventListener("click", () => {
  showsAllEvents = !showsAllEvents;
  again();
});
document.addEventListener("visibilitychange", () => wakeUp());

run();
