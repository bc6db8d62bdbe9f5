// What a token of role admin may do: save a checkpoint, change the mode.

import { $, setText } from "./dom.js";
import { Refused } from "./coordinator.js";
import { bytes, UNKNOWN, whole } from "./words.js";

const ACTION_TIMEOUT_MS = 120_000;
const READS = "This page only reads. With a token of role admin it saves checkpoints and changes the mode.";
const LOCKED = "A token of any role shows it. psctl token create makes one.";

export class Actions {
  /**
   * @param {Coordinator} coordinator Is asked, and keeps the token.
   * @param {Function} changed Called when there may be something new to show.
   */
  constructor(coordinator, changed) {
    Object.assign(this, { coordinator, changed, isAdmin: false, isLocked: false });
    $("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.use($("token").value.trim());
    });
    $("token-forget").addEventListener("click", () => {
      this.forget();
      this.tell("The token is forgotten.", true);
      $("token").focus();
    });
    $("checkpoint-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.act(event.target, "Saving a checkpoint.", "actions/checkpoint", {}, (saved) =>
        `Checkpoint ${saved.name} is complete: clock ${whole(saved.clock)}, ${bytes(saved.byte_count)}.`);
    });
    $("mode-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.changeMode();
    });
    $("mode-name").addEventListener("change", () => this.show());
    this.show();
  }

  /** Says whether the job is shown to nobody without a token. */
  lock(isLocked) {
    if (isLocked && this.coordinator.token) this.forget();
    this.isLocked = isLocked;
    this.show();
  }

  show() {
    const { isAdmin, isLocked } = this;
    for (const section of document.querySelectorAll("main > :not(#access)")) section.hidden = isLocked;
    $("actions").hidden = !isAdmin;
    $("token-forget").hidden = !this.coordinator.token;
    $("mode-staleness").disabled = $("mode-name").value !== "ssp";
    $("mode-quorum").disabled = $("mode-name").value !== "quorum";
    setText($("access-title"), isLocked ? "This job asks for a token" : "Actions");
    setText($("access-text"), isAdmin ? "The token has role admin." : isLocked ? LOCKED : READS);
  }

  tell(text, isGood) {
    $("outcome").dataset.tone = isGood ? "good" : "bad";
    setText($("outcome"), text);
  }

  forget() {
    this.coordinator.token = "";
    this.isAdmin = false;
    this.show();
  }

  async use(token) {
    this.forget();
    $("token").value = "";
    this.coordinator.token = token;
    try {
      await this.coordinator.ask("actions", { method: "POST" });
      this.isAdmin = true;
      this.tell("The token has role admin.", true);
    } catch (error) {
      if (error.code !== 403) this.coordinator.token = ""; // 403: it may read
      this.tell(problem(error), error.code === 403);
    }
    this.show();
    this.changed();
  }

  changeMode() {
    const { status } = this.coordinator;
    const mode = $("mode-name").value;
    const bound = mode === "ssp" ? $("mode-staleness").valueAsNumber : null;
    const quorum = mode === "quorum" ? $("mode-quorum").valueAsNumber : null;
    const apart = bound !== null ? `, at most ${bound} clocks apart` : quorum === null ? "" : ` of ${quorum}`;
    const dialog = $("sure");
    setText($("sure-text"), `Change the mode of ${status.job.job_id} from ${status.mode} to ${mode}${apart}?`);
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return;
      const body = { mode, staleness_bound: bound, quorum };
      this.act($("mode-form"), "Changing the mode.", "actions/mode", body, (changed) =>
        `The mode is ${changed.mode} after clock ${whole(changed.mode_clock)}.`);
    }, { once: true });
    dialog.showModal();
  }

  async act(form, doing, path, body, done) {
    const button = form.querySelector("[type=submit]");
    button.disabled = true;
    this.tell(doing, true);
    try {
      const answer = await this.coordinator.ask(path, { method: "POST", body, timeoutMs: ACTION_TIMEOUT_MS });
      this.tell(done(answer), true);
    } catch (error) {
      this.tell(problem(error), false);
    } finally {
      button.disabled = false;
      this.changed();
    }
  }
}

function problem(error) {
  if (error instanceof Refused) return `Refused: ${error.message}.`;
  return "The coordinator does not answer. The events show whether it was done.";
}
