"""The budget that pays, from measured costs and running acceptance, and never more.

A round is chosen to maximise E[tokens] - lambda E[seconds], with lambda the running tokens
per second: over many rounds that maximises their ratio. Plain decoding is always one of the
choices, and the only one where the ledger (`engine.ledger`) has no room for what a proposal
may cost. So no sequence of acceptances makes the engine slower than plain decoding by more
than eps and a start.

The ledger is the engine's: a round's tokens count `t_plain(B) / B` each, so what one request
of a batch gains may pay for what another loses. It is the ledger of the mean request.

What is decided depends on committed tokens, on verdicts and times of rounds that are over,
and on deterministic proposals. It never depends on a token that was drawn for the round, so
that a round is exact for whatever budget it got (docs/guarantees.md, "Budgets").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.core.latency import Profile
from paceline.draft.base import Arm, Drafter, blind, names_of
from paceline.engine.acceptance import Acceptance
from paceline.engine.costs import Costs, Work
from paceline.engine.course import Course
from paceline.engine.explore import Lengths, Probes, Rates
from paceline.engine.plan import Choice, Choices, Plan, work_of
from paceline.engine.policy import Part, Round
from paceline.engine.purse import AdaptiveConfig, Purse
from paceline.engine.tally import Tally
from paceline.engine.terms import Terms
from paceline.types import Sequence

#: An interruption is charged up to so many times what the round was expected to take; behind a
#: prompt nothing is, as every first step finds the caches full of it.
TRIM, COLD_TRIM = 3.0, 1.0
#: Plain steps of a size of batch before anything is drafted. Later ones keep the measure of what
#: speculation is compared with: as many as may cost so much, and no more than every so many rounds.
CALIBRATION, PLAIN_SHARE, PLAIN_GAP = 3, 0.01, 4
#: Rounds that a new drafter's trial lasts. It may begin with reading a prompt where that takes
#: no larger share of what is left of the request.
TRIAL_ROUNDS, TRIAL_SHARE = 5, 0.1
#: Plain steps that are all measured. Of later ones so many that it takes no larger share of
#: their time, and one in so many at least.
MEASURED, LOOKING, RAREST = 32, 0.002, 32
#: Rounds for which nothing is even asked, at most.
QUIET = 16


class AdaptivePolicy:
    """Mutable; one engine's. clock: seconds, for what deciding itself takes."""

    def __init__(
        self,
        profile: Profile,
        drafter: Drafter,
        config: AdaptiveConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = config or AdaptiveConfig()
        self.costs = Costs(profile)
        self.acceptance = Acceptance()
        self._purse = Purse(config)
        self.ledger = self._purse.ledger
        self._drafter = drafter
        self._untried = list(names_of(drafter))
        self._clock = clock
        self._lengths = Lengths()
        self._rates = Rates()
        self._choices = Choices(self.costs, self.acceptance, self._lengths)
        self._terms = Terms(drafter, self._choices, config.most)
        self._probes = Probes()
        self._probing: tuple[int, str] | None = None
        self._plan: Plan | None = None
        self._thinking = 0.0
        self._learning = 0.0  # what looking at the last round took
        self._look_in = 0  # plain steps until one is looked at again
        self._cold = False  # whether the last round read a prompt
        self._quiet = 0  # plain rounds to come, of the settled sequences, without a question
        self._course = Course()
        self._kept = False  # whether this round goes on with a choice to draft
        self._tally = Tally()

    # -- deciding ---------------------------------------------------------------------------

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        self._probing, self._kept = None, False
        if self._quiet > 0 and self._terms.stand(seqs):
            self._quiet, self._thinking = self._quiet - 1, 0.0
            self._probes.unasked += 1
            self._plan = self._terms.settled
            return [0] * len(seqs)
        self._quiet = 0
        start = self._clock()
        self._plan = plan = self._unchanged(seqs) or self._decide(seqs)
        self._thinking = self._clock() - start
        return [plan.choices[s.id].budget for s in seqs]

    def _unchanged(self, seqs: Seq[Sequence]) -> Plan | None:
        """A plain decision for the same sequences once more, where nothing that anybody sees
        could change it: at the least expense, as these are most rounds of a text on which nothing
        pays."""
        known, course = self._terms.settled, self._course
        if known is None or not self._terms.stand(seqs) or any(s.pending > 1 for s in seqs):
            return None
        if not self._trying() and not self._purse.solvent(course.plain):
            course.stop_drafting()
            self._quiet = min(self._purse.rounds_until_solvent(course.plain), QUIET)
            self._probes.unasked += 1
            return known
        if not course.holds_blindly(known) or self._held(seqs, known, {}) is None:
            return None
        self._quiet = max(min(course.rounds, self._probes.wait(course.passed), QUIET) - 1, 0)
        course.rounds -= self._quiet
        return known

    def _trying(self) -> bool:
        """Whether any drafter's trial is not over: room may be made for it."""
        self._untried = [name for name in self._untried if self._on_trial(name)]
        return bool(self._untried)

    def limit(self, most: int) -> None:
        """Change the largest budget."""
        self._terms.most = most

    def route(self, seq: Sequence) -> str | None:
        """Which drafter shall propose for a sequence in this round; None where any may."""
        choice = self._plan.choices.get(seq.id) if self._plan else None
        return choice.arm.drafter if choice and choice.free and choice.arm else None

    def _decide(self, seqs: Seq[Sequence]) -> Plan:
        if not self._terms.stand(seqs):
            self._purse.spend()  # what was refused was refused to others
        base = self._terms.plain(seqs)
        choices = base.choices
        free = [s for s in seqs if choices[s.id].free and s.n_output > 0]
        for s in free:
            self._lengths.note(s)
        # A step that reads a prompt is long: nothing that it could bring is worth the doubt
        # that it would throw on what a plain step takes.
        reading = any(s.pending > 1 for s in seqs)
        if reading or not free or self.costs.plain_seen(len(seqs)) < CALIBRATION:
            return base
        lost = 1.0 - 1.0 / self._rates.speedup(len(seqs))
        if self._tally.since_plain(len(seqs)) >= max(PLAIN_GAP, lost / PLAIN_SHARE):
            return base
        arms = {s.id: self._terms.arms(s) for s in free}
        held = self._held(seqs, base, arms)
        if held or not any(arms.values()):
            return held or base
        on_trial = {a.drafter for m in arms.values() for a in m if self._on_trial(a.drafter)}
        if not on_trial and not self._purse.solvent(self._course.plain):
            return base
        start = self._clock()
        base = self._choices.plan(seqs, choices)
        self._purse.scale(base.seconds)
        self._purse.spend()
        chosen = self._best(seqs, free, arms, base)
        plan = self._with_probe(seqs, free, arms, base, chosen)
        self._course.decided(self._clock() - start, base.seconds)
        self._hold(plan, arms, on_trial, whole=len(free) == len(seqs))
        return plan

    def _hold(
        self, plan: Plan, arms: dict[int, list[Arm]], on_trial: set[str], *, whole: bool
    ) -> None:
        """Let a decision hold, if it is one that can. whole: it was made for all sequences."""
        drafting = [c.arm for c in plan.choices.values() if c.free and c.arm and c.budget]
        used = {arm.drafter for arm in drafting}
        names = {a.drafter for many in arms.values() for a in many}
        if plan.work.extra:
            # Not a probe, a trial, or the reading of a prompt: these are done once.
            reading = any(arm.lag > self._terms.most + 1 for arm in drafting)
            if self._probing or reading or used & on_trial or not whole:
                return
        passed = sorted(names - used - on_trial)
        self._course.hold(plan, arms, passed, blind=whole and blind(self._drafter))

    def _held(self, seqs: Seq[Sequence], base: Plan, arms: dict[int, list[Arm]]) -> Plan | None:
        """The last decision once more; None where a new one is due."""
        course = self._course
        if course.rounds and (self._probes.pass_over(course.passed) or self._purse.saved):
            course.end()
        if not course.rounds or not course.goes_on(arms):
            return None
        assert course.plan is not None
        if not course.plan.work.extra:
            return base
        permitted = self._purse.permits(course.plan.seconds, course.plain)
        plan = course.again(seqs, arms) if permitted else None
        if plan is None:
            course.end()
        self._kept = plan is not None
        return plan

    def _best(
        self, seqs: Seq[Sequence], free: Seq[Sequence], arms: dict[int, list[Arm]], base: Plan
    ) -> Plan:
        """The most valuable round that the ledger permits; `base` where none beats it."""
        price = self._rates.speedup(len(seqs)) * len(seqs) / base.seconds
        for plan in self._choices.better(seqs, free, arms, base, price):
            who = [s for s in free if plan.choices[s.id].arm]
            if self._permitted(plan, base, who):
                for name in {c.arm.drafter for c in plan.choices.values() if c.free and c.arm}:
                    self._probes.of(name).adopted()
                return plan
            self._purse.save_for(plan.seconds, base.seconds)
        return base

    def _permitted(self, plan: Plan, base: Plan, who: Seq[Sequence]) -> bool:
        """Whether the ledger has room. For each drafter's first rounds room is made."""
        if self._purse.permits(plan.seconds, base.seconds):
            return True
        new = next((d for d in plan.work.drafters if d and self._on_trial(d)), None)
        left = sum(self._lengths.remaining(s.n_output, s.params.max_tokens) for s in who)
        share = TRIAL_SHARE * left * base.seconds / len(plan.work.budgets)
        if new is None or plan.catching_up > share:
            return False
        return self._purse.admits(new, plan.seconds, base.seconds)

    def _on_trial(self, drafter: str) -> bool:
        return self._tally.rounds[drafter] < TRIAL_ROUNDS

    # -- exploring --------------------------------------------------------------------------

    def _with_probe(
        self,
        seqs: Seq[Sequence],
        free: Seq[Sequence],
        arms: dict[int, list[Arm]],
        base: Plan,
        chosen: Plan,
    ) -> Plan:
        """The chosen round, and a few nodes more for one sequence where a drafter that was
        not asked is due for another look and the ledger has room."""
        used = {c.arm.drafter for c in chosen.choices.values() if c.arm and c.budget}
        passed = {
            a.drafter: (s, a)
            for s in reversed(free)
            if chosen.choices[s.id].budget == 0
            for a in arms[s.id]
            if a.drafter not in used
        }
        self._probes.pass_over(passed)
        for name, (seq, arm) in passed.items():
            probe = self._probes.of(name)
            if not probe.due and not self._on_trial(name):
                continue
            k = min(probe.size, arm.most)
            choice = Choice(arm, k, True, chosen.choices[seq.id].mode)
            plan = self._choices.plan(seqs, {**chosen.choices, seq.id: choice})
            plan = replace(plan, catching_up=self.costs.catching_up(name, arm.lag))
            if self._permitted(plan, base, [seq]):
                self._probing = (seq.id, name)
                self._tally.probes += 1
                return plan
            probe.postponed(self._purse.rounds_until(plan.seconds, base.seconds))
        return chosen

    # -- learning ---------------------------------------------------------------------------

    def observe(self, done: Round) -> None:
        start = self._clock()
        plain = self._plan is not None and self._plan is self._terms.settled and not done.reads
        known = self.costs.plain_seen(len(done.parts))
        if plain and self._look_in > 0 and known >= CALIBRATION:
            self._look_in -= 1
            self._cold = False
            self._tally.add_plain(len(done.parts))
            self._record_plain(done)
            self._learning = self._clock() - start
            return
        self._observe(done)
        self._cold = done.reads
        self._learning = self._clock() - start
        if plain and known > MEASURED:
            self._look_in = min(int(self._learning / (LOOKING * done.seconds)), RAREST - 1)

    def _record_plain(self, done: Round) -> None:
        """A plain step: it took what a plain step takes, and what deciding took. Keeping drafter
        and policy informed is not charged: it is done whatever is decided, and where it takes more
        than eps there would be no room ever again."""
        self.ledger.record(done.seconds, done.seconds - self._thinking)

    def _observe(self, done: Round) -> None:
        plan = self._plan
        if plan is None:
            return
        parts = [p for p in done.parts if p.seq_id in plan.choices]
        # A round of requests that name their own k is no choice of this policy's: it neither
        # makes room in the ledger nor takes any.
        ours = any(plan.choices[p.seq_id].free for p in parts)
        if done.reads or not parts:
            if ours:
                self.ledger.record(done.seconds, done.seconds)
            return
        self._tally.add([p.drafted for p in parts], _drafters(parts, plan))
        if self._kept and all(p.drafted == plan.choices[p.seq_id].budget for p in parts):
            # As it was chosen: what it costs was looked at then, and will be soon again.
            share, emitted = self._course.plain / len(parts), sum(p.emitted for p in parts)
            seconds = self._trimmed(done, plan.seconds) + self._learning
            self.ledger.record(seconds, share * emitted)
            self._course.add(seconds, share * emitted)
            self._rates.add(len(parts), emitted, share, done.seconds)
            self._accept(parts, plan)
            return
        chosen = [plan.choices[p.seq_id] for p in parts]  # what was really done
        work = work_of(chosen, [p.drafted for p in parts], [p.context for p in parts])
        t_pass = max(done.t_target + done.t_other - self._thinking, 1e-9)
        if not self._cold:
            self.costs.observe(work, done.t_draft, t_pass)
        self._accept(parts, plan)
        if ours:
            self._charge(parts, plan, work, done)
        self._judge_probe(parts, plan, work)

    def _trimmed(self, done: Round, expected: float) -> float:
        """Seconds of a round, as far as they are what was decided."""
        return min(done.seconds, (COLD_TRIM if self._cold else TRIM) * expected)

    def _accept(self, parts: Seq[Part], plan: Plan) -> None:
        for p in parts:
            arm = plan.choices[p.seq_id].arm
            if arm is not None and p.drafted:
                self.acceptance.update(p.seq_id, arm, p.drafted, p.accepted)

    def _charge(self, parts: Seq[Part], plan: Plan, work: Work, done: Round) -> None:
        """Enter the round in the ledger, and what it brought in the running speed-up."""
        free = [p for p in parts if plan.choices[p.seq_id].free]
        plain = self.costs.plain(work.contexts, work.mode)
        share = plain / len(parts)
        drafted = sum(p.drafted for p in free)
        forced = work.extra - drafted
        asked = any(p.budget for p in free)
        if not asked:
            self._record_plain(done)
        else:
            expected = self.costs.of(work)
            seconds = self._trimmed(done, expected) + self._learning
            if forced:
                kept = tuple(0 if plan.choices[p.seq_id].free else p.drafted for p in parts)
                without = self.costs.of(replace(work, budgets=kept)) / expected * seconds
                gained = sum(p.emitted - 1 for p in free)
                self.ledger.record(seconds, without + share * gained)
            else:
                self.ledger.record(seconds, share * sum(p.emitted for p in parts))
        if not forced:
            self._rates.add(len(parts), sum(p.emitted for p in parts), share, done.seconds)

    def _judge_probe(self, parts: Seq[Part], plan: Plan, work: Work) -> None:
        """Whether a probe's tokens were worth what it took, catching up aside."""
        if self._probing is None:
            return
        seq_id, name = self._probing
        part = next((p for p in parts if p.seq_id == seq_id), None)
        if part is None or part.drafted == 0:
            return
        without = replace(
            work,
            budgets=tuple(
                0 if p.seq_id == seq_id else b for p, b in zip(parts, work.budgets, strict=True)
            ),
        )
        before, plain = self.costs.of(without), self.costs.plain(work.contexts, work.mode)
        cost = self.costs.of(work) - before
        lasting = self.costs.of(replace(work, lags=(1,) * len(parts))) - before
        self._probes.of(name).done(part.accepted * plain / len(parts) > lasting, cost / plain)

    def forget(self, seq_id: int) -> None:
        self.acceptance.forget(seq_id)
        self._lengths.forget(seq_id)

    def usage(self) -> dict[str, object]:
        ledger = self.ledger
        return {
            "policy": "adaptive",
            "k": self._terms.most,
            **self._tally.as_dict(),
            "acceptance": self.acceptance.summary(),
            "ledger_debt_s": round(ledger.debt, 6),
            "ledger_bound_s": round(ledger.bound, 6),
            "ledger_plain_s": round(ledger.plain, 6),
        }


def _drafters(parts: Seq[Part], plan: Plan) -> set[str]:
    """Who really proposed something."""
    arms = [plan.choices[p.seq_id].arm for p in parts if p.drafted]
    return {arm.drafter for arm in arms if arm is not None}
