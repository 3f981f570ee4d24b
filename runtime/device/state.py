"""The state that one device keeps from step to step: memories with their accounts, arenas and files, the state of its
stages, and the counters of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ...ir import ops
from ...ir.errors import HardwareError, PlanError
from ...ir.precision import Precision
from ...ir.program import FIRST_FORM, Account, Interface, StageHome, team_of
from ..accelerator import growing_segments, limit_allocator, restore_allocator, settle
from ..bad_step import BadStep
from ..compiled.blocks import BACKEND, require_compiler
from ..optimizer.gradients import LossScale, LossScales
from ..optimizer.stage_optimizer import StageOptimizer, Workspace
from ..ssd.file import SsdFile
from ..ssd.folder import SsdFolder
from ..stage.arena import Arena, pages
from ..stage.saver import piece_bytes
from ..stage.shards import FlatStage
from ..stage.store import StagePart, StageStore, StoreSetup
from .file import DeviceFile
from .host import Trimmer, node_of
from .prepare import Issues
from .setup import DeviceSetup

LASTING = "all steps' "  # no value of a program has such a name
UNSEEN_BYTES = 256 << 20  # at least this for memory that no account sees, even on a GPU described as very small


class SessionMemory:
    """The memory that the plans of a session's functions ("step", "evaluate") need, taken at the start.

    `host_device` has DRAM's arena. Raises `BudgetExceeded` if what persists is already too much.
    """

    def __init__(
        self,
        setup: DeviceSetup,
        plans: Mapping[str, Issues],
        device: torch.device,
        host_device: torch.device | None = None,
    ):
        self.spec, self.hardware, self.plans, self.device = setup.spec, setup.hardware, plans, device
        self.accounts = {
            ops.DEVICE: Account(self.spec.name, self.spec.budget_bytes),
            ops.DRAM: Account(f"dram{self.spec.host}", setup.dram_budget_bytes),
        }
        host_device = torch.device("cpu") if host_device is None else host_device
        self.device_arena = Arena(device)
        self.node = node_of(device)
        self.dram_arena = Arena(host_device, on_pages=True, pinned=device.type == "cuda", node=self.node)
        self.folder: SsdFolder | None = None
        self.ssd_arena: SsdFile | None = None
        self._share_before: float | None = None  # the share of the GPU's memory that torch's allocator could take
        for memory in (ops.DEVICE, ops.DRAM):
            for what, num_bytes in plans["step"].persistent.parts(memory).items():
                if num_bytes:
                    self.accounts[memory].take(f"{LASTING}{what}", num_bytes, "the start")
        with ExitStack() as held:
            held.enter_context(growing_segments(device))
            self.grow(ops.DEVICE, plans["step"].arenas[ops.DEVICE])
            self.grow(ops.DRAM, max(plan.arenas[ops.DRAM] for plan in plans.values()))
            self._held = held.pop_all()  # until `close`

    def grow(self, memory: str, num_bytes: int) -> None:
        """Make a memory's arena at least `num_bytes` large; only between steps."""
        arena, account = (self.device_arena if memory == ops.DEVICE else self.dram_arena), self.accounts[memory]
        if num_bytes > arena.bytes:
            if arena.bytes:
                account.give(f"{LASTING}arena")
            account.take(f"{LASTING}arena", num_bytes, "the start")
            arena.ensure(num_bytes)

    def take_files(self, directories: Sequence[str], verify: bool) -> None:
        """Take the space for activations on SSD, and open the folder in which each stage takes its own.

        Raises `HardwareError` for directories that are missing or cannot be used, `DoesNotFit` for lack of room.
        """
        arena_bytes = max(plan.arenas[ops.SSD] for plan in self.plans.values())
        kinds = self.plans["step"].persistent.ssd
        lasting = {what: max(plan.persistent.ssd[what] for plan in self.plans.values()) for what in kinds}
        if not arena_bytes and not any(lasting.values()):
            return
        name = f"ssd{self.spec.host}"
        account = self.accounts[ops.SSD] = Account(name, self.hardware.budget_bytes(name))
        for what, num_bytes in {**lasting, "arena": arena_bytes}.items():
            if num_bytes:
                account.take(f"{LASTING}{what}", num_bytes, "the start")
        self.open_files(directories, verify, arena_bytes)

    def open_files(self, directories: Sequence[str], verify: bool, arena_bytes: int) -> None:
        if not directories:
            raise HardwareError(
                f"the plan keeps a part of the model on ssd{self.spec.host}, but no directory is known; "
                'pass ssd_dirs=["/mnt/nvme0"], one directory per SSD, or name them in the hardware document'
            )
        self.folder = SsdFolder(directories, self.spec.name, verify=verify)
        if arena_bytes:
            self.ssd_arena = self.folder.reserve("activations", arena_bytes)

    def staging(self, num_bytes: int) -> Tensor:
        """The first part of DRAM's arena, which holds nothing between steps."""
        if num_bytes > self.dram_arena.bytes:
            return pages(num_bytes, node=self.node)
        return self.dram_arena.range(0, num_bytes)

    def hold_allocator(self) -> None:
        """Limit torch's allocator to the described memory of the GPU, until `close`.

        The account limits values to the budget, which leaves a part of that memory to what no account sees: workspaces
        of cuBLAS, the allocator's rounding and gaps.
        """
        if self.device.type != "cuda":
            return
        most_bytes = max(self.spec.memory_bytes, self.spec.budget_bytes + UNSEEN_BYTES)
        self._share_before = limit_allocator(self.device, most_bytes)

    def close(self) -> None:
        """Remove the files, and restore the earlier limit of torch's allocator."""
        self._held.close()
        if self.folder is not None:
            self.folder.close()
        if self._share_before is not None:
            restore_allocator(self.device, self._share_before)
            self._share_before = None


class DeviceState:
    """The stages of one device in its memories, and how far its run is.

    `resident`: the weights of each stage or, for a shard, which is gathered before use, its flat buffer. `bad_step`:
    None where steps cannot be undone. Raises `BudgetExceeded` if what persists is already too much, `HardwareError` for
    directories that cannot be used, `DoesNotFit` if the disks lack the room, `PlanError` if torch.compile lacks what it
    needs.
    """

    def __init__(
        self,
        setup: DeviceSetup,
        file: DeviceFile,
        interface: Interface,
        plans: Mapping[str, Issues],
        device: torch.device,
        bad_step: BadStep | None = None,
    ):
        self.index, self.interface, self.device = setup.index, interface, device
        self.forms = {FIRST_FORM: interface}  # those of the file and of others that have come, by number
        self.bad_step, self.stop_on_nan = bad_step, setup.stop_on_nan
        self._member: dict[str, Tensor] = {}  # this device's number in groups over lanes
        self.seed, self.step_count = setup.seed, 0
        self.evaluation_count = 0  # since the last step
        self.ungraphed: dict[str, str] = {}  # of stages that run as written though the plan has graphs, why
        self.loss_scale = LossScale() if Precision.of(setup.precision).scales_loss else None
        self.trimmer: Trimmer | None = None  # until the end of the first step on these weights
        self.compiler = BACKEND if setup.compile_stages else None
        if self.compiler is not None:
            require_compiler(device, self.compiler)
        self._moving = plans["step"].moving
        self.memory = self._take_memory(setup, plans)
        self.workspaces = {ops.COMPUTE: Workspace(device), ops.CPU: Workspace(torch.device("cpu"))}  # of steps
        try:
            self.memory.take_files(setup.share.ssd_dirs, setup.share.ssd_verify)
            homes = self._find_homes(plans)
            self.stores = {stage: self._make_store(stage, home, setup, file) for stage, home in homes.items()}
        except BaseException:
            self.memory.close()
            raise
        self.resident = {name: s.flat if homes[name].group else s.weights for name, s in self.stores.items()}
        self.memory.hold_allocator()

    def _take_memory(self, setup: DeviceSetup, plans: Mapping[str, Issues]) -> SessionMemory:
        return SessionMemory(setup, plans, self.device)

    def _find_homes(self, plans: Mapping[str, Issues]) -> dict[str, StageHome]:
        homes: dict[str, StageHome] = {}
        for plan in plans.values():
            for stage, home in plan.homes.items():
                if homes.setdefault(stage, home).weights != home.weights:
                    raise PlanError(f"device {self.index}: {stage} is in different memories in the file's functions")
        return homes

    def _make_store(self, stage: str, home: StageHome, setup: DeviceSetup, file: DeviceFile) -> StageStore:
        module, trained = file.build(stage), home.states is not None
        if trained and setup.optimizer is None:
            raise PlanError(f"device {self.index}: the program updates {stage}, but there is no optimizer")
        how = StoreSetup(
            self.device,
            home,
            setup.precision,
            weights_move=bool(home.group) or stage in self._moving,
            optimizer=setup.optimizer if trained else None,
            flat_stage=self._flat_stage(stage, home.group),
            folder=self.memory.folder,
            in_files=setup.in_files.get(stage, {}),
            staging=self.memory.staging,
            workspace=self.workspaces[ops.COMPUTE if ops.DEVICE in (home.weights, home.states) else ops.CPU],
            constants=file.constants(self.interface.stages[stage]),
            node=self.memory.node,
            compiler=self.compiler,
            member=team_of(self.interface, self.index).index(self.index),
        )
        return StageStore(self.interface.stages[stage], module, self.interface, how)

    def take_form(self, number: int, form: Interface, file: DeviceFile, plans: Mapping[str, Issues]) -> None:
        """Run micro-batches of this form by the stages of a file of their own. `plans`: those with room for all."""
        self.forms[number] = form
        for stage, store in self.stores.items():
            spec = form.stages[stage]
            kept_bytes = self.interface.stages[stage].kept_bytes
            store.take_form(number, spec, file.build(stage), file.constants(spec), kept_bytes)
        self.memory.plans = plans
        self.memory.grow(ops.DRAM, max(plan.arenas[ops.DRAM] for plan in plans.values()))
        self.memory.device_arena.forget()
        self.memory.dram_arena.forget()

    def _flat_stage(self, stage: str, group: str) -> FlatStage | None:
        """The layout of a stage that is spread over its group, as this device has it; None for a whole stage."""
        if not group:
            return None
        members, segments = self.interface.members(group), self.interface.segments_of(stage, group)
        return FlatStage(self.interface.stages[stage], segments, members.index(self.index), len(members))

    def members_in(self, group: str) -> list[int]:
        """The devices that a group over lanes, as a lane's program names it, joins with this one."""
        own = (name for name in self.interface.groups if name.startswith(f"{group}."))
        return next(found for found in map(self.interface.members, own) if self.index in found)

    def member_in(self, group: str) -> Tensor:
        """This device's number among them, as a value of programs; made once, as copies to a GPU are waited for."""
        if group not in self._member:
            self._member[group] = torch.tensor([self.members_in(group).index(self.index)], device=self.device)
        return self._member[group]

    # --- loading and saving, between steps

    def load_weights(self, source: Callable[[str], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> None:
        """Fill every stage with what `source(stage name)` gives: weights and buffers by name."""
        for name in self.stores:
            self.load_stage(name, *source(name))

    def load_stage(self, stage: str, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set a stage's weights and buffers to copies of these."""
        self.stores[stage].load(weights, buffers)
        self._settle()

    def stage_state(self, stage: str) -> StagePart:
        return self.stores[stage].state()

    def state_to_write(self, stage: str) -> StagePart:
        """As `stage_state`, but what is on SSD is read piece by piece while it is written, into memory of the arena."""
        store = self.stores[stage]
        return store.state_on_ssd(self.memory.staging(piece_bytes([store])))

    def optimizer_of(self, stage: str) -> StageOptimizer:
        found = self.stores[stage].optimizer
        assert found is not None, f"{stage} is not trained here"
        return found

    def load_stage_state(self, stage: str, state: StagePart) -> None:
        self.stores[stage].load_state(state)
        self._settle()

    def _settle(self) -> None:
        """Wait until values loaded on the default stream are in place, before any other stream reads them."""
        settle(self.device)
        self.trimmer = Trimmer() if self.device.type == "cpu" else None

    def counters(self) -> dict[str, Any]:
        """The counters that a checkpoint stores beside the stages."""
        scale = None if self.loss_scale is None else [self.loss_scale.scale, self.loss_scale.good_steps]
        return {"step": self.step_count, "seed": self.seed, "loss_scale": scale}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self.step_count, self.seed, self.evaluation_count = counters["step"], counters["seed"], 0
        if self.loss_scale is not None and counters.get("loss_scale"):
            self.loss_scale.scale, self.loss_scale.good_steps = counters["loss_scale"]

    # --- from step to step

    def count_step(self) -> None:
        """A step has been issued."""
        self.step_count += 1
        self.evaluation_count = 0

    def commit(self) -> None:
        """End a step."""
        for store in self.stores.values():
            store.commit()

    @property
    def gradient_scale(self) -> float:
        """The factor on losses, and so on gradients."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def judge_norm(self, squares: float, scales: LossScales | None = None) -> tuple[float, bool]:
        """The gradients' norm, from their scaled sum of squares, and whether the step was skipped because it is not
        finite. Sets the loss scale of the next step accordingly. `scales`: of an asynchronous step, whose last norm
        this is; the step counts as skipped if one of its updates was."""
        if scales is not None:
            self.loss_scale = scales.last
            return squares**0.5 / scales.scale_of(self.interface.mini_batches - 1), scales.skipped > 0
        scale, finite = self.gradient_scale, squares < float("inf")
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return squares**0.5 / scale, self.loss_scale is not None and not finite

    def eager_blocks(self) -> dict[str, dict[str, str]]:
        """Of stages that are to run compiled: stage -> class of blocks, or chain of calls -> why it runs eagerly."""
        found: dict[str, dict[str, str]] = {}
        for name, store in self.stores.items():
            for r in store.of_forms.values():
                found.setdefault(name, {}).update(r.chains_as_written | (r.compiled.reasons if r.compiled else {}))
        return {name: reasons for name, reasons in found.items() if reasons}

    def forget_values(self) -> None:
        """Remove the values of a step from the accounts."""
        for account in self.memory.accounts.values():
            for name in [name for name in account.live if not name.startswith(LASTING)]:
                account.give(name)
