// The five clocks of a task. Which of them run follows from the task's state alone, so a paused task has none that runs.

export const CLOCKS = ["start", "idle", "turn", "active", "end"];

/** Seconds of each clock where a start names none. A gateway always names all five. */
export const DEFAULT_LIMITS = { start: 300, idle: 3600, turn: 600, active: 86_400, end: 30 };

const RUNNING = {
  starting: ["start"],
  waiting: ["idle", "active"],
  acting: ["turn", "active"],
  pausing: ["turn", "active"],
  paused: [],
  done: [],
  ending: ["end"],
  ended: [],
};

/** The clocks of one task: consumed seconds and since when they run, never a deadline. `now` gives monotonic seconds. */
export class Clocks {
  #clocks;
  #now;

  constructor(limits, now) {
    this.#now = now;
    this.#clocks = CLOCKS.map((name) => ({ name, limit_s: limits[name], consumed_s: 0, since_s: null }));
  }

  /** Let run what runs in a state, and stop the rest. A new turn begins `idle` and `turn` anew; a resume does not. */
  enter(state, { newTurn = false } = {}) {
    const now = this.#now();
    for (const clock of this.#clocks) {
      clock.consumed_s = newTurn && (clock.name === "idle" || clock.name === "turn") ? 0 : consumed(clock, now);
      clock.since_s = RUNNING[state].includes(clock.name) ? now : null;
    }
  }

  /** The running clock that has used up its limit, the one that did so first; null if none has. */
  expired() {
    const now = this.#now();
    const left = (clock) => clock.limit_s - consumed(clock, now);
    const over = this.#clocks.filter((clock) => clock.since_s !== null && left(clock) <= 0);
    return over.sort((one, other) => left(one) - left(other))[0]?.name ?? null;
  }

  /** As an answer shows them. */
  view() {
    const now = this.#now();
    return Object.fromEntries(
      this.#clocks.map((clock) => {
        const used = consumed(clock, now);
        const left = Math.max(0, clock.limit_s - used);
        return [clock.name, { limit_s: clock.limit_s, consumed_s: rounded(used), remaining_s: rounded(left) }];
      }),
    );
  }
}

function consumed(clock, now) {
  return clock.consumed_s + (clock.since_s === null ? 0 : now - clock.since_s);
}

/** To a tenth of a millisecond: more digits say nothing. */
function rounded(seconds) {
  return Math.round(seconds * 1e4) / 1e4;
}
