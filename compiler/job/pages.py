"""The pages of a job: `explain` in words, and the report in HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...ir.errors import PlanError
from ...ir.program import Program
from ...runtime import scratch
from ...runtime.optimizer.stage_optimizer import OptimizerSpec
from ...runtime.simulate import Timeline
from ...runtime.source.trust import Trust
from ..folder import Folder
from ..pipeline import PassRecord
from ..replanner import Replanner
from ..report.brief import brief_text
from ..report.compiled import compiled_text, find_blocks
from ..report.explain import explain
from ..report.graphs import graphs_text
from ..report.lengths import StepsOfAnySize, Throughput
from ..report.page.content import ReportInputs, report_facts
from ..report.page.write import page_of
from ..search.what_helps import Help
from ..steps import simulate_here
from .run import JobRun


class Pages:
    """The pages of a job, also what they say of steps of any size."""

    def __init__(
        self,
        folder: Folder,
        programs: Sequence[Program],
        records: Sequence[PassRecord],
        replanner: Replanner | None,
        trust: Trust,
    ):
        self.folder, self.programs, self.records, self.trust = folder, programs, records, trust
        self.replanner = replanner
        self.helps: list[Help] | None = None  # None until somebody asks, as it takes up to half a minute
        self.any_size: StepsOfAnySize | None = None
        if (sizes := folder.settings.sizes) is not None:
            stages_at = None if replanner is None else replanner.stages_at
            self.any_size = StepsOfAnySize(programs, folder.hardware, folder.plan.precision, sizes, stages_at)

    def learn_helps(self) -> None:
        """Plan what would help, the first time."""
        if self.helps is None and self.replanner is not None:
            self.helps = self.replanner.helps()

    def explain(self, run: JobRun, full: bool) -> str:
        """The answer in a few lines; `full`: and the reasons for this plan, what would help, and what the last step of
        `run` has shown of compiled blocks and CUDA graphs."""
        folder, known = self.folder, self.folder.settings
        plan, hardware = folder.plan, folder.hardware
        answer = ""
        if plan.predicted is not None:
            timeline = simulate_here(self.programs, hardware, plan.precision)
            stages = list(folder.interface.stages)
            answer = brief_text(run.model, plan, hardware, stages, timeline, known.batch, full)
        if answer and not full:
            return answer
        self.learn_helps()
        spec = OptimizerSpec.from_json(known.optimizer)
        parts = [answer] if answer else []
        parts.append(explain(plan, self.programs, hardware, self.records, self.helps, known.loss, known.rows, spec))
        if known.comparison:
            parts.append(known.comparison)
        if known.compile_stages:
            parts.append(compiled_text(self._blocks(), run.eager_blocks))
        if self.any_size is not None and self.any_size.stages_at is not None:
            parts.append(self.any_size.table())
        if folder.interface.cuda_graphs:
            parts.append(graphs_text(self.programs, run.ungraphed))
        return "\n\n".join(parts)

    def _blocks(self) -> Any:
        with scratch.temporary("explain") as directory:
            self.folder.write(directory)
            return find_blocks(directory, self.folder.interface, self.trust)

    def simulate(self, sizes: Mapping[str, int]) -> Timeline:
        """One step on the described hardware, with micro-batches of these sizes."""
        if self.any_size is not None:
            return self.any_size.simulate(sizes)
        if sizes:
            raise PlanError(f"simulate({', '.join(sizes)}=...): the job was compiled without dynamic_shapes")
        return simulate_here(self.programs, self.folder.hardware, self.folder.plan.precision)

    def throughput(self, lengths: Iterable[Any]) -> Throughput:
        """Simulated tokens a second over batches of these lengths."""
        if self.any_size is None:
            raise PlanError("throughput: the job was compiled without dynamic_shapes, all its batches have one length")
        return self.any_size.throughput(lengths)

    def offer(self, times: Mapping[int, float]) -> dict[str, Any] | None:
        """A faster plan for devices that are slower than planned by these factors, as plain data."""
        if self.replanner is None:
            raise PlanError("a job that was loaded cannot be planned again: make it with compile, then ask it")
        found = self.replanner.offer(times)
        return None if found is None else found.to_data()

    def page(
        self,
        measured: Timeline | None,
        machines: Sequence[Mapping[str, Any]] = (),
        price_per_hour: float | None = None,
        spell: Callable[[Any], Any] | None = None,
    ) -> str:
        """The plan, and a measured step beside it, as one page of HTML."""
        folder = self.folder
        ids = [shape for name, shape, _ in folder.settings.batch if name.endswith("input_ids")]
        tokens = sum(math.prod(shape) for shape in ids) or None
        inputs = ReportInputs(
            folder.plan, self.programs, folder.hardware, folder, measured, self.helps or (), tokens, machines,
            price_per_hour,
        )  # fmt: skip
        facts = report_facts(inputs)
        if spell is not None:
            facts |= {name: spell(facts[name]) for name in ("rivals", "helps", "machines")}
        return page_of(facts)
