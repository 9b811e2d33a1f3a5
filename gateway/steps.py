"""Training steps: which trajectories and calls belong to each, and what it took."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway import serialization
from gateway.invocations.record import Record
from gateway.store.store import Store
from manager.action import State
from manager.engine import Engine
from manager.errors import Reason
from manager.learning import BatchState, Lifetimes
from tangram.types import StepInfo

#: Lifetimes that are kept of a step, drawn evenly from all of its ended rollouts; the longest is always among them.
SAMPLE_MAX = 128


@dataclass(slots=True, kw_only=True, eq=False)
class TaskStep:
    """What was told of a step, and what was seen of it since. A rollout is a trajectory, or a call of none.

    Instants are wall-clock seconds.
    """

    task: str
    number: int
    opened_s: float
    #: Rollouts that it is to have; None until that is told.
    expected: int | None = None
    ended: int = 0
    #: When the last expected one ended; None before.
    ended_s: float | None = None
    #: Most rollouts that lived at once.
    most_living: int = 0
    #: Some of the ended ones' lifetimes, in seconds.
    sample_s: list[float] = field(default_factory=list)
    #: Living trajectories by name, and living calls of none by id, with the instants from which they count.
    trajectories: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    #: Openings of its trajectories that are under way.
    waiting: int = 0
    #: When it was last told, or a rollout of it began or ended; not on record, so at the earliest this gateway's start.
    stirred_s: float = 0.0

    @property
    def living(self) -> int:
        return len(self.trajectories) + len(self.calls)

    def expect(self, expected: int, now_s: float) -> None:
        """Note how many rollouts it is to have, for the first time or anew."""
        self._stir(now_s)
        self.expected = expected
        self._conclude(now_s)

    def begin(self, rollouts: dict[str, float], name: str, since_s: float) -> None:
        """Count a rollout, one of ``trajectories`` or ``calls``, as living."""
        rollouts[name] = since_s
        self.most_living = max(self.most_living, self.living)
        self._stir(since_s)

    def end(self, since_s: float, now_s: float, *, seen: bool = True) -> None:
        """Count one that lived since then as ended; unless its end was ``seen`` nobody knows how long it lived."""
        self.ended += 1
        self._stir(now_s)
        if seen:
            self._keep(max(0.0, now_s - since_s))
        self._conclude(now_s)

    def quiet_s(self, now_s: float) -> float:
        """Return for how long it was not told, nor anything of it lived or waited; 0 while something does."""
        return 0.0 if self.living or self.waiting else max(0.0, now_s - self.stirred_s)

    def _stir(self, now_s: float) -> None:
        self.stirred_s = max(self.stirred_s, now_s)

    def _conclude(self, now_s: float) -> None:
        if self.expected is None or self.ended < self.expected:
            self.ended_s = None
        elif self.ended_s is None:
            self.ended_s = now_s

    def _keep(self, lifetime_s: float) -> None:
        """Keep each lifetime with the same chance, but the longest for certain: it is the end of the step."""
        if len(self.sample_s) < SAMPLE_MAX:
            self.sample_s.append(lifetime_s)
            return
        longest = max(range(SAMPLE_MAX), key=self.sample_s.__getitem__)
        place = random.randrange(self.ended)
        if lifetime_s >= self.sample_s[longest]:
            self.sample_s[longest] = lifetime_s
        elif place < SAMPLE_MAX and place != longest:
            self.sample_s[place] = lifetime_s


#: Most tasks whose steps are kept, the one told of least recently goes, and most steps of each, the one opened first
#: goes: their lifetimes tell of the next step, and beyond a few nobody looks at them.
TASKS_MAX, STEPS_MAX = 256, 32
#: Steps of a task, the newest first, whose lifetimes tell of the next one's.
LEARNED_STEPS = 4
#: What a screen is shown: so many steps, none that ended or lay still longer ago (s): the page's longest timeline.
RECENT_MAX, RECENT_S = 12, 1800.0
#: With these the scheduler refuses what it never took.
REFUSALS = (Reason.QUOTA, Reason.INVALID_INPUT, Reason.INTERNAL)
#: Component of a record that ended without a settlement (`Record.end`).
NOT_OF_SCHEDULER = "gateway"


class TaskSteps:
    """The steps that were told of. Use from one event loop.

    Of each task the newest `STEPS_MAX` are kept, and of tasks the `TASKS_MAX` that were told of last.
    What changes is noted in the store at once, in one transaction with the record that changed it.
    """

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        #: By task, the one told of last at the end (after a restart, that of the newest step); steps by number, in the
        #: order in which they were opened.
        self._steps: dict[str, dict[int, TaskStep]] = {}
        self._of_trajectory: dict[str, TaskStep] = {}
        #: Invocations that have not ended, by trajectory: it lives with them, before the scheduler knows of it.
        self._invoked: Counter[str] = Counter()
        #: Trajectories that calls brought under a step, none of which has started.
        self._unbegun: set[str] = set()
        self._living: Engine | None = None
        #: Whether ends are those of this gateway's time: until then they were some time while none was up.
        self._began = False

    async def load(self) -> None:
        """Read what is on record, before any invocation is taken up; raises StorageUnavailable."""
        for row in await self._store.read("steps", ()):
            step = TaskStep(**(dict(row) | {"sample_s": json.loads(row["sample_s"]), "stirred_s": self._wall()}))
            steps = self._steps[step.task] = self._steps.pop(step.task, {})  # they come in the order of their opening
            steps[step.number] = step
        for row in await self._store.read("step_trajectories", ()):
            step = self._steps[row["task"]][row["number"]]
            step.trajectories[row["trajectory"]] = row["since_s"]
            self._of_trajectory[row["trajectory"]] = step
        self._bound()

    def take_up(self, living: Engine) -> None:
        """Go on with what an earlier gateway left: a trajectory that did not outlive it has ended.

        One whose invocations were recovered goes on, though they wait for their function or for a node.
        """
        self._living = living
        for name in list(self._of_trajectory):
            self._end_if_gone(name)
        self._began = True

    def _end_if_gone(self, trajectory: str) -> None:
        """End one whose end nobody will tell; it was no rollout if nothing of it has started."""
        if not self._gone(trajectory):
            return
        if trajectory not in self._unbegun:
            self.trajectory_ended(trajectory)
        elif (step := self._leave(trajectory)) is not None:
            del step.trajectories[trajectory]

    def _gone(self, trajectory: str) -> bool:
        """Whether neither the scheduler knows of it nor any invocation is to begin it."""
        known = self._living is None or self._living.trajectory(trajectory) is not None
        return not known and not self._invoked[trajectory]

    # What is told

    async def tell(self, task: str, number: int, expected: int) -> StepInfo:
        """Open a step or change what is expected of it, durably; raises StorageUnavailable."""
        step = self._step(task, number)
        step.expect(expected, self._wall())
        self._save(step)
        await self._store.commit()
        return self.info(step)

    @contextmanager
    def opening(self, task: str, number: int | None) -> Iterator[None]:
        """Count a trajectory of a step as waiting within the block, in which it is opened."""
        if number is None:
            yield
            return
        step = self._step(task, number)
        step.waiting += 1
        try:
            yield
        finally:
            step.waiting -= 1

    async def opened(self, trajectory: str, task: str, number: int) -> None:
        """Count a trajectory as of the step that it was opened under, durably; raises StorageUnavailable.

        One that is of a step already stays with it, and one that has ended meanwhile is of none.
        """
        lives = self._living is not None and self._living.trajectory(trajectory) is not None
        if lives and trajectory not in self._of_trajectory:
            self._join(trajectory, task, number, self._wall())
            await self._store.commit()

    def trajectory_ended(self, trajectory: str) -> None:
        """Count the end of a trajectory, if it is of a step."""
        step = self._leave(trajectory)
        if step is not None:
            self._end(step, step.trajectories.pop(trajectory))

    # What becomes of the invocations

    def accepted(self, record: Record) -> None:
        """A call that names a step begins a rollout, or brings its trajectory under the step."""
        if record.trajectory is not None:
            self._invoked[record.trajectory] += 1
        number = record.options.get("step")
        if not isinstance(number, int):
            return
        if record.trajectory is not None:
            self._bring(record, record.trajectory, number)
        else:
            step = self._step(record.task, number)
            step.begin(step.calls, record.id, record.accepted_s)

    def _bring(self, record: Record, trajectory: str, number: int) -> None:
        """Bring the trajectory of a call under a step, if it is of none; a restart does that again."""
        if trajectory not in self._of_trajectory:
            self._join(trajectory, record.task, number, record.accepted_s)
        since_s = self._of_trajectory[trajectory].trajectories[trajectory]
        if since_s == record.accepted_s and record.started_s is None:
            self._unbegun.add(trajectory)

    def started(self, record: Record) -> None:
        """A trajectory begins with the first start of its calls."""
        if record.trajectory is not None and record.started_s is not None:
            self._unbegun.discard(record.trajectory)

    def ended(self, record: Record) -> None:
        """The end of a call of no trajectory is that of a rollout, unless the scheduler never took it.

        The end of a trajectory is told, unless the scheduler never took any call of it.
        """
        if record.trajectory is not None:
            self._invoked[record.trajectory] -= 1
            if self._invoked[record.trajectory] <= 0:
                del self._invoked[record.trajectory]
            if record.component == NOT_OF_SCHEDULER:
                self._end_if_gone(record.trajectory)
            return
        number = record.options.get("step")
        if not isinstance(number, int):
            return
        refused = record.state is State.FAILED and record.started_s is None and record.reason in REFUSALS
        step = self._steps.get(record.task, {}).get(number)
        since_s = None if step is None else step.calls.pop(record.id, None)
        if step is not None and since_s is not None and not refused:
            self._end(step, since_s)

    # What is shown

    def of(self, task: str) -> list[StepInfo]:
        """Return the steps of a task, that opened last first; none if none was told of."""
        return [self.info(step) for step in reversed(self._steps.get(task, {}).values())]

    def unfinished(self, task: str) -> list[StepInfo]:
        """Return the steps of a task that have not ended, that opened last first."""
        steps = reversed(self._steps.get(task, {}).values())
        return [self.info(step) for step in steps if step.ended_s is None]

    def tasks(self) -> list[str]:
        """Return the tasks of which some step has not ended."""
        return [task for task, steps in self._steps.items() if any(step.ended_s is None for step in steps.values())]

    def recent(self) -> list[StepInfo]:
        """Return the `RECENT_MAX` steps that opened last, of those of all tasks that go on or ended not long ago.

        What neither ended nor goes on was abandoned.
        """
        now_s = self._wall()
        result = (each for steps in self._steps.values() for each in steps.values())
        quiet_s = ((each, each.quiet_s(now_s) if each.ended_s is None else now_s - each.ended_s) for each in result)
        shown = [each for each, since_s in quiet_s if since_s <= RECENT_S]
        return [self.info(each) for each in heapq.nlargest(RECENT_MAX, shown, key=lambda each: each.opened_s)]

    def info(self, step: TaskStep) -> StepInfo:
        """Return a step as it stands now."""
        return StepInfo(
            task=step.task,
            step=step.number,
            expected=step.expected,
            living=step.living,
            ended=step.ended,
            waiting=step.waiting,
            opened_at=serialization.instant(step.opened_s),
            ended_at=None if step.ended_s is None else serialization.instant(step.ended_s),
            ends_in_s=self._ends_in_s(step),
        )

    def _ends_in_s(self, step: TaskStep) -> float | None:
        """Return the seconds until its last expected rollout is expected to end; None if nothing tells, or it has.

        Nor is an end expected of what is abandoned: it has been quiet for longer than any rollout took.
        """
        if step.expected is None or step.ended_s is not None:
            return None
        now_s = self._wall()
        ages_s = [max(0.0, now_s - since_s) for since_s in (*step.trajectories.values(), *step.calls.values())]
        learned = list(self._learned_from(step))
        ended = [(lifetime_s, each.ended / len(each.sample_s)) for each in learned for lifetime_s in each.sample_s]
        if ended and step.quiet_s(now_s) > max(lifetime_s for lifetime_s, _ in ended):
            return None
        at_once = max(each.most_living for each in (step, *learned))
        batch = BatchState(ages_s=ages_s, needed=step.expected - step.ended, at_once=at_once)
        return Lifetimes(ended, ages_s).ends_in_s(batch)

    def _learned_from(self, step: TaskStep) -> Iterable[TaskStep]:
        sampled = [each for each in self._steps[step.task].values() if each.sample_s]
        return sampled[-LEARNED_STEPS:]

    # The steps that there are

    def _end(self, step: TaskStep, since_s: float) -> None:
        step.end(since_s, self._wall(), seen=self._began)
        self._save(step)

    def _step(self, task: str, number: int) -> TaskStep:
        """Return a step, which is opened if there is none; its task is that told of last."""
        steps = self._steps[task] = self._steps.pop(task, {})
        step = steps.get(number)
        if step is None:
            now_s = self._wall()
            step = steps[number] = TaskStep(task=task, number=number, opened_s=now_s, stirred_s=now_s)
            self._save(step)
            self._bound()
        return step

    def _bound(self) -> None:
        while len(self._steps) > TASKS_MAX:
            for step in list(self._steps.pop(next(iter(self._steps))).values()):
                self._forget(step)
        for steps in self._steps.values():
            while len(steps) > STEPS_MAX:
                self._forget(steps.pop(next(iter(steps))))

    def _forget(self, step: TaskStep) -> None:
        for trajectory in step.trajectories:
            del self._of_trajectory[trajectory]
            self._unbegun.discard(trajectory)
        self._store.note("delete_step_trajectories", step.task, step.number)
        self._store.note("delete_step", step.task, step.number)

    def _join(self, trajectory: str, task: str, number: int, since_s: float) -> None:
        step = self._of_trajectory[trajectory] = self._step(task, number)
        step.begin(step.trajectories, trajectory, since_s)
        self._store.note("save_step_trajectory", trajectory, task, number, since_s)

    def _leave(self, trajectory: str) -> TaskStep | None:
        self._unbegun.discard(trajectory)
        step = self._of_trajectory.pop(trajectory, None)
        if step is not None:
            self._store.note("delete_step_trajectory", trajectory)
        return step

    def _save(self, step: TaskStep) -> None:
        sample = serialization.encode([round(each, 3) for each in step.sample_s]).decode()
        values = (step.opened_s, step.expected, step.ended, step.ended_s, step.most_living, sample)
        self._store.note("save_step", step.task, step.number, *values)
