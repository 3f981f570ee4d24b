"""One stage, executed: forward, backward and evaluation of its module, exactly as eager PyTorch would.

The reference and the device runtime share this file. A `StageRunner` owns the stage's module, its buffers and its
`Parameter` objects, but not the weights: `bind` points the parameters at tensors that the runtime holds, anew for every
fetch. Gradients add up in `Parameter.grad`, micro-batch after micro-batch, so their order of additions is eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ...ir.errors import VerifyError
from ...ir.precision import Precision
from ...ir.program import StageGraphs, StageSpec, TensorSpec, found_sizes
from ..accelerator import storage_of, storages_of
from ..compiled.block_trial import BlockTrial, fake_run
from ..compiled.blocks import BACKEND, KEEPS, CompiledBlocks
from ..compiled.chain_kernels import has_chains, make_kernels
from ..modules import Scope, Stage, recomputing, unread_paths
from ..optimizer.hooks import change_params
from ..quantised.pieces import keep_unpacked_weights, keeps_weights_on
from ..torch_names import NormBase, engine_run_backward
from .draws import Draws
from .graphed_stage import GraphedStage
from .kept import Kept
from .saved_classes import Keeping, SavedClasses, Taking
from .saved_places import SavedPlaces, with_own_storage
from .split_backward import Rest, input_half, weight_half

NOTHING = nullcontext()
ENTERED = False, False, ()  # of a backward: it keeps no graph, makes none, and adds up the gradients of all leaves
REACHING = {"allow_unreachable": True, "accumulate_grad": True}


class StageRunner:
    """Runs one stage on one device; see the module's text.

    A mixed `precision` runs forward under autocast; parameters and buffers have the dtypes of `spec`.
    `weights_move` says that the weights may be elsewhere in backward than in forward (they are fetched): then autograd
    saves a place inside a parameter, not an address. Resident stages pass False and save that work. `compiler`: the
    backend of `torch.compile` that runs the stage's blocks; None to run them as written.

    Raises `VerifyError` if module and `spec` do not belong together.
    """

    def __init__(
        self,
        spec: StageSpec,
        module: nn.Module,
        device: torch.device,
        precision: str,
        weights_move: bool = True,
        compiler: str | None = None,
    ):
        self.spec = spec
        self.module = module
        self.device = torch.device(device)
        self.precision = Precision.of(precision)
        self.weights_move = weights_move
        self.has_sizes = any(row.dims for row in spec.inputs)  # these differ from micro-batch to micro-batch
        self._leaves_out = None in spec.backward_inputs
        # Measured once, on the first micro-batch; where sizes differ, it is what the largest keeps.
        self.kept_bytes: int | None = spec.kept_bytes if self.has_sizes else None
        self.graphs: GraphedStage | None = None  # what runs in place of forward and backward
        self.classes = SavedClasses(spec)
        if isinstance(module, Stage):
            module.device = self.device
            _check_unread(spec, module)
        self.draws = Draws(spec.name, module, self.device)
        outputs = (*spec.outputs, *spec.extra_outputs) if self.precision.low_dtype is not None else ()
        self._dtypes = [getattr(torch, output.dtype) for output in outputs]
        self.compiled = None if compiler is None else CompiledBlocks(module, compiler)
        self.has_chains = has_chains(module) and self.device.type == "cuda"
        self.chains_as_written: dict[str, str] = {}  # chains of calls without kernels, and why
        self._params = _own_parameters(spec, module, self.device)
        self._trained = {name: p for name, p in self._params.items() if p.requires_grad}
        self._changes = [param for param in spec.params if param.change]
        self._buffers = _named_buffers(module)
        self._training = {m: m.training for m in module.modules()}
        self._checked = False  # whether its first forward agreed with the interface
        self._noted: tuple[Hashable, dict[str, Tensor]] = -1, {}  # a step, and its buffers before the first forward
        self._evaluating = False
        self._bound: dict[str, Tensor] | None = None
        self._held: set[int] = set()  # storages of parameters and buffers: no output may share them
        self._places = SavedPlaces(self._params, self.device, spec.pointwise_again)
        self._adding: dict[str, Tensor] | None = None  # gradients that still are those of the parameters
        self._constants: dict[tuple[TensorSpec, float], Tensor] = {}  # gradients of losses

    # --- parameters and buffers

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters, each once, under the first of its names in the stage's interface."""
        return dict(self._params)

    def bind(self, weights: dict[str, Tensor]) -> None:
        """Let the parameters be these tensors (shared, not copied). One dict object always means the same tensors."""
        if weights is self._bound:
            return
        for name, param in self._params.items():
            param.data = weights[name]
        self._held = {storage_of(t) for t in (*self._params.values(), *self.buffers().values())}
        self._places.forget(self._held)
        self._bound = weights

    def release(self) -> None:
        """Let go of the bound weights."""
        for param in self._params.values():
            param.data = torch.empty(0, dtype=param.dtype, device=self.device)
        self._bound = None
        self._places.forget(self._held)

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Set all buffers, persistent or not, to copies of `values` on the device."""
        self._noted = -1, {}
        if self.graphs is not None:  # which read the buffers where they are
            for name, buffer in self.buffers().items():
                buffer.copy_(values[name])
            return
        dtypes = {b.name: getattr(torch, b.dtype) for b in self.spec.buffers}
        fresh: dict[int, Tensor] = {}
        for name, (owner, key) in self._buffers.items():
            old = owner._buffers[key]
            if name not in values:
                raise VerifyError(f"{self.spec.name} has a buffer {name!r}, for which there is no value")
            dtype = dtypes.get(name, values[name].dtype)
            value = values[name].detach().to(self.device, dtype)
            fresh.setdefault(id(old), value.clone(memory_format=torch.contiguous_format))
        old_ids = {name: id(owner._buffers[key]) for name, (owner, key) in self._buffers.items()}
        for name, (owner, key) in self._buffers.items():
            owner._buffers[key] = fresh[old_ids[name]]
        self._bound = None

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, not copied."""
        return {name: owner._buffers[key] for name, (owner, key) in self._buffers.items()}  # type: ignore[misc]

    def prepare_buffers(self, step: Hashable, undo: bool = False) -> None:
        """Before the first forward of a step or an evaluation, note buffers: all that forward changes, if the step can
        be undone, else the repeated buffers. Before a later forward, set the repeated buffers to what was noted."""
        if step == self._noted[0]:
            self._set_buffers({name: self._noted[1][name] for name in self.spec.repeated_buffers})
        elif names := self.spec.noted_buffers(undo):
            self._noted = -1, {}  # frees the copies of the step before
            buffers = {name: buffer for name, buffer in self.buffers().items() if name in names}
            copies = {id(buffer): buffer.clone() for buffer in buffers.values()}  # one for all names of a tied buffer
            self._noted = step, {name: copies[id(buffer)] for name, buffer in buffers.items()}

    def put_back_buffers(self, step: int) -> None:
        """Be as noted before this step."""
        if step == self._noted[0]:
            self._set_buffers(self._noted[1])
            self._noted = -1, {}

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in values.items():
            owner, key = self._buffers[name]
            owner._buffers[key] = tensor
            self._bound = None  # which storages no output may share

    # --- the ways to run

    def try_kernels(self, keeps: Sequence[bool | Sequence[str]]) -> None:
        """Compile the stage's blocks, or make kernels for its chains of calls, and try them. Before the first step, by
        the thread and on the stream that will run the stage. `keeps`: of its forwards."""
        if self.has_chains:
            self.chains_as_written = make_kernels(self._run_on_fakes, self.device, self.precision, BACKEND)
        if self.compiled is None:
            return
        if any(keep and not isinstance(keep, bool) for keep in keeps):
            self.compiled.leave_all(KEEPS)
            return
        shapes = {id(self._params[param.name]): param.shape for param in self.spec.params}
        trial = BlockTrial(self.spec, self.device, self.precision, shapes)
        self.compiled.try_classes(self._run_on_fakes, trial, [True, False] if not all(keeps) else [True])

    def _run_on_fakes(self) -> None:
        rows = [self.spec.inputs, *([self.spec.backward_inputs] if self.spec.again is not None else [])]
        for row, again in zip(rows, (False, True)):
            with self.draws.seed_draws(0), self.precision.autocast(self.device), recomputing(self.module, again):
                fake_run(self.module, self.spec, row, self._params, self.device)

    def make_graphs(self, graphs: StageGraphs) -> str:
        """Run the stage from CUDA graphs from now on, on the weights that are bound. Before the first step, by the
        thread and on the stream that will run it. Returns why it cannot, "" if it does."""
        made = GraphedStage(self.spec, self.device, graphs)
        reason = made.reason(self)
        if not reason:
            made.capture(self)
            self.graphs = made
        return reason

    def forward(
        self, inputs: Sequence[Tensor], seed: int, keep: bool | Sequence[str] = True
    ) -> tuple[list[Tensor], Kept | None]:
        """Training mode. Outputs carry no graph and share no memory with inputs, weights or buffers.

        `keep`: True for all that backward needs, False for nothing, or names of classes of saved tensors
        (`spec.saved`). Raises `VerifyError` for a class that does not agree with the stage's calls.
        """
        if self.graphs is not None and isinstance(keep, bool):
            graphed, slot = self.graphs.forward(inputs, keep)
            return graphed, None if slot is None else Kept.from_graph(slot, self.graphs.kept_bytes)
        first = not self._checked
        if self.spec.changing_buffers and not first:
            self._renew_changing()
        keeping = self.classes.keeping(keep) if not isinstance(keep, bool) and keep else None
        outputs, leaves = self._run(inputs, seed, keep is True, keeping, first)
        if first:
            self._check_outputs(inputs, outputs)
            self._checked = True
        kept = None
        if keeping is not None:
            keeping.finish()
            kept = Kept.partial(keeping.tensors, keeping.aside)
        elif keep is True:
            assert self.kept_bytes is not None
            kept = Kept(outputs, leaves, self.kept_bytes)
        return self._detach(outputs, inputs), kept

    def backward(
        self,
        kept: Kept | None,
        inputs: Sequence[Tensor | None],
        douts: Sequence[Tensor | float | None],
        grads: dict[str, Tensor] | None,
        seed: int,
        places: Mapping[str, Tensor] | None = None,
        more: bool = False,
        unpack_once: bool = False,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients of the inputs that require one, and of the parameters, added to `grads` in place.

        If `kept` is None, forward runs again first, with the same `seed` and without updating buffers; it leaves out
        what backward needs nothing of (`spec.again`), so that inputs for this alone may be None. If `kept` is partial,
        this forward takes its tensors without computing them, and lets go of them. A parameter that no gradient reached
        has no entry, just as its `.grad` is None in eager. `places`: where the gradients go,
        by parameter; each goes there as soon as it is complete. `more`: a later backward adds to these gradients, which
        live until then, so that the parameters may keep them. `unpack_once`: the second forward leaves the quantised
        weights that it unpacks.
        """
        if self.graphs is not None and not (kept is not None and kept.is_partial):
            return self.graphs.backward(None if kept is None else kept.slot, inputs, douts, grads)
        if kept is None or kept.is_partial:
            with keep_unpacked_weights(self.device.type) if unpack_once else NOTHING:
                kept = self._rematerialise(kept, inputs, seed, weights_move=False)
        edges, values = self._entries(kept, douts)
        grads = {} if grads is None else grads
        taken = {t.untyped_storage().data_ptr() for t in (*inputs, *values) if t is not None}
        run: Callable[[], object] = _nothing
        if edges:  # what `torch.autograd.backward` does once it has looked at edges and values, which are ours
            run = partial(engine_run_backward, tuple(edges), tuple(values), *ENTERED, **REACHING)
        if places:
            with self._moving_to(grads, places):
                self._add_up(run, grads, taken, places)
        else:
            self._add_up(run, grads, taken, None, more)
        dinputs = _dinputs(kept, taken)
        kept.drop()
        return dinputs, grads

    def backward_input(
        self, kept: Kept | None, inputs: Sequence[Tensor | None], douts: Sequence[Tensor | float | None], seed: int
    ) -> tuple[list[Tensor], Rest]:
        """Gradients of the inputs alone, and what `backward_weight` needs for those of the parameters. If `kept` is
        None or partial, forward runs again first, as for `backward`."""
        if kept is None or kept.is_partial:
            kept = self._rematerialise(kept, inputs, seed, self.weights_move)
        edges, values = self._entries(kept, douts)
        rest = input_half(edges, values, kept.leaves, self._trained)
        noted = {storage_of(t): t.untyped_storage().nbytes() for t in rest.tensors()}
        given = [x for x in inputs if x is not None]
        rest.num_bytes = (self.kept_bytes or 0) + sum(x.nbytes for x in given) + sum(noted.values())
        dinputs = _dinputs(kept, {*map(storage_of, (*given, *values)), *noted})
        for leaf in kept.leaves:
            leaf.grad = None  # the graph lives on, and holds its leaves
        kept.drop()
        return dinputs, rest

    def backward_weight(
        self, rest: Rest, grads: dict[str, Tensor] | None, places: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Gradients of the parameters, added to `grads` in place. Uses up `rest`. `places`: where they go."""
        grads = {} if grads is None else grads
        taken = {storage_of(t) for t in rest.tensors()}
        self._add_up(lambda: weight_half(rest, self._trained), grads, taken, places)
        return grads

    def evaluate(self, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Evaluation mode, without gradients: all outputs, those that exist only here after the others."""
        self._set_mode(evaluating=True)
        if self._changes:
            self._change_params()
        if self.spec.repeated_buffers:
            self._renew_changing()
        with self.draws.seed_draws(seed), torch.no_grad(), self.precision.autocast(self.device):
            leaves = map(_laid_out, inputs, self.spec.inputs)
            return self._detach(_cast_to_plan(self.module(*leaves), self._dtypes), inputs)

    # --- inside

    def _entries(self, kept: Kept, douts: Sequence[Tensor | float | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges at which gradients enter the graph, and these gradients."""
        edges, values = [], []
        for edge, want, dout in zip(kept.edges, self.spec.outputs, douts, strict=True):
            if edge is not None and dout is not None:
                edges.append(edge)
                values.append(dout if isinstance(dout, Tensor) else self._filled_tensor(want, dout))
        return edges, values

    def _filled_tensor(self, like: TensorSpec, value: float) -> Tensor:
        """A tensor that is nothing but this value; a number, as the gradient of a loss is, is made once."""
        if like.shape:
            return torch.full(like.shape, value, dtype=getattr(torch, like.dtype), device=self.device)
        found = self._constants.get((like, value))
        if found is None:
            self._constants = {key: made for key, made in self._constants.items() if key[0] != like}
            found = torch.full((), value, dtype=getattr(torch, like.dtype), device=self.device)
            self._constants[like, value] = found
        return found

    def _add_up(
        self,
        run: Callable[[], object],
        grads: dict[str, Tensor],
        taken: set[int],
        places: Mapping[str, Tensor] | None = None,
        more: bool = False,
    ) -> None:
        """Let the parameters' gradients of `run` add up in `grads`, each at its place or in memory of its own. `more`:
        they stay those of the parameters, as setting each anew takes the host longer than all else of a small
        backward."""
        trained, stay = self._trained, False
        if self._adding is not grads and (grads or self._adding is not None):  # else no parameter has one
            for name, param in trained.items():
                param.grad = grads.get(name)
        try:
            run()
            for name, param in trained.items() if len(grads) < len(trained) else ():
                if name not in grads and (grad := param.grad) is not None:
                    if places is not None:
                        grads[name] = places[name].copy_(grad)
                        continue
                    if (storage := grad.untyped_storage().data_ptr()) in taken or grad.stride() != param.stride():
                        param.grad = grad = with_own_storage(_laid_out_as(param, grad), taken)
                    else:
                        taken.add(storage)
                    grads[name] = grad
            stay = more
        finally:
            self._adding = grads if stay else None
            for param in () if stay else trained.values():
                param.grad = None

    @contextmanager
    def _moving_to(self, grads: dict[str, Tensor], places: Mapping[str, Tensor]) -> Iterator[None]:
        """Copy each first gradient to its place as soon as it is complete, and give its own memory back."""

        def move(name: str, param: Tensor) -> None:
            assert param.grad is not None
            grads[name] = places[name].copy_(param.grad)
            param.grad = None

        new = {name: param for name, param in self._trained.items() if name in places and name not in grads}
        hooks = [param.register_post_accumulate_grad_hook(partial(move, name)) for name, param in new.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _rematerialise(
        self, partial: Kept | None, inputs: Sequence[Tensor | None], seed: int, weights_move: bool = False
    ) -> Kept:
        if self._leaves_out:
            inputs = [None if want is None else x for x, want in zip(inputs, self.spec.backward_inputs, strict=True)]
        taking = self.classes.taking(partial.tensors, partial.aside) if partial is not None else None
        leaving_out = NOTHING if self.spec.again is None else recomputing(self.module, True)
        with self._spare_buffers() if self._buffers else NOTHING, leaving_out:
            outputs, leaves = self._run(inputs, seed, True, taking, weights_move=weights_move)
        if partial is not None and taking is not None:
            taking.finish()
            partial.drop()
        return Kept(outputs, leaves, 0)

    def _run(
        self,
        inputs: Sequence[Tensor | None],
        seed: int,
        keep: bool,
        calls: Keeping | Taking | None,
        first: bool = False,
        weights_move: bool | None = None,
    ) -> tuple[list[Any], list[Tensor]]:
        """The training outputs, with None for those that are left out, and the inputs that get gradients as leaves of
        their graph. `calls` is entered around the module. `weights_move`: whether the weights may be elsewhere once
        the graph is used; None for what the runner knows."""
        if self._changes:
            self._change_params()
        if self._evaluating:
            self._set_mode(evaluating=False)
        given: list[Any] = []
        leaves: list[Tensor] = []
        for x, want in zip(inputs, self.spec.inputs, strict=True):
            leaf = x if x is None else _laid_out(x, want) if want.order else x.contiguous()
            if keep and want.requires_grad:
                if leaf is None:  # its value is not needed, but its gradient is
                    leaf = torch.zeros((), dtype=getattr(torch, want.dtype), device=self.device).expand(want.shape)
                leaf = leaf.detach().requires_grad_()
                leaves.append(leaf)
            given.append(leaf)
        versions = [leaf._version for leaf in given] if first else []
        # Taken tensors may share memory.
        measure = keep and self.kept_bytes is None and not (isinstance(calls, Taking) or keeps_weights_on())
        moves = self.weights_move if weights_move is None else weights_move
        storages: dict[int, int] = {}
        contexts = [self.precision.autocast(self.device)] if self.precision.autocasts else []
        if self.draws.may_draw:
            contexts.append(self.draws.seed_draws(seed, first))
        if keep and (moves or measure or self.spec.pointwise_again):
            contexts.append(self._places.hooks(storages if measure else None))
        if calls is not None:
            contexts.append(calls)
        elif self.compiled is not None:
            contexts.append(self.compiled.run_compiled(NOTHING))
        if keep is not torch.is_grad_enabled():
            contexts.append(torch.set_grad_enabled(keep))
        with all_of(contexts) if contexts else NOTHING:
            outputs = list(self.module(*given)[: len(self.spec.outputs)])
            if self._dtypes:
                outputs = _cast_to_plan(outputs, self._dtypes)
        if first:
            self._check_inputs(given, versions)
            self._check_bound()
        if measure:
            # Some inputs are copies.
            storages.update((storage_of(leaf), leaf.untyped_storage().nbytes()) for leaf in given if leaf is not None)
            ours = self._held | {storage_of(x) for x in inputs if x is not None}
            self.kept_bytes = sum(size for storage, size in storages.items() if storage not in ours)
        return outputs, leaves

    def _change_params(self) -> None:
        """Change the weights as the user's forward does, unseen by autograd. The second time changes nothing."""
        change_params(self._changes, {name: param.data for name, param in self._params.items()})

    def _renew_changing(self) -> None:
        """Let a forward change copies of the buffers, so that what an earlier micro-batch has saved stays as it was.
        Norms save none of theirs."""
        places = [self._buffers[name] for name in self.spec.changing_buffers]
        fresh: dict[int, Tensor] = {}  # by the id of what each replaces: one for all names of a tied buffer
        for owner, key in places:
            old = owner._buffers[key]
            if old is not None and not isinstance(owner, NormBase):
                if id(old) not in fresh:
                    fresh[id(old)] = old.clone()
                owner._buffers[key] = fresh[id(old)]

    @contextmanager
    def _spare_buffers(self) -> Iterator[None]:
        """Let a second forward change copies of the buffers, which are then thrown away."""
        places = [self._buffers[name] for name in self.spec.changing_buffers]
        originals = [owner._buffers[key] for owner, key in places]
        for owner, key in places:
            owner._buffers[key] = owner._buffers[key].clone()  # type: ignore[union-attr]
        try:
            yield
        finally:
            for (owner, key), original in zip(places, originals):
                owner._buffers[key] = original

    def _set_mode(self, evaluating: bool) -> None:
        """Evaluation mode, or the training flags that the module came with."""
        if evaluating != self._evaluating:
            for module, training in self._training.items():
                module.training = training and not evaluating
            self._evaluating = evaluating

    def _detach(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        taken, found = storages_of(inputs), []
        for output in outputs:
            found.append(with_own_storage(output.detach() if output.requires_grad else output, taken, self._held))
        return found

    def _check_inputs(self, leaves: Sequence[Tensor], versions: Sequence[int]) -> None:
        for leaf, version, want in zip(leaves, versions, self.spec.inputs):
            if leaf._version != version:
                raise VerifyError(
                    f"{self.spec.name} changes its input {want.name!r} in place; cut the model before its producer"
                )

    def _check_bound(self) -> None:
        """A parameter that its module lays somewhere else would never see an update."""
        bound = self._bound or {}
        for name in bound.keys() & self._params.keys():
            if self._params[name].data_ptr() != bound[name].data_ptr():
                raise VerifyError(f"{self.spec.name} moves its parameter {name!r} to other memory when it runs")

    def _check_outputs(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        name = self.spec.name
        if len(outputs) != len(self.spec.outputs):
            raise VerifyError(f"{name} gives {len(outputs)} outputs, its interface has {len(self.spec.outputs)}")
        sizes = found_sizes((row.dims, x.shape) for row, x in zip(self.spec.inputs, inputs))
        for output, want in zip(outputs, self.spec.outputs):
            found = (tuple(output.shape), str(output.dtype).removeprefix("torch."))
            if found != (want.shape_at(sizes), want.dtype):
                raise VerifyError(
                    f"output {want.name!r} of {name} is {found[1]}{list(found[0])}, "
                    f"its interface says {want.dtype}{list(want.shape)}"
                )


def _nothing() -> None:
    """The backward of a stage that no gradient enters."""


def all_of(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """All of these contexts, the last one innermost. Most runs need none or one, and a stack of them takes the host as
    long as a launch."""
    if len(contexts) < 2:
        return contexts[0] if contexts else NOTHING
    return _enter_all(contexts)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _check_unread(spec: StageSpec, module: Stage) -> None:
    blocks = {path for path, member in module.named_modules() if isinstance(member, Scope)}
    unknown = next((path for path in unread_paths(module) if path not in blocks), None)
    if unknown is not None:
        known = ", ".join(sorted(blocks - {""}))
        raise VerifyError(f"{spec.name}: unread={unknown!r} is no block of the stage; it has {known}")


def _laid_out(tensor: Tensor, want: TensorSpec) -> Tensor:
    """An input in the layout that the plan says: the tensor itself where it has that layout, else a copy."""
    if not want.order:
        return tensor.contiguous()
    inverse = sorted(range(len(want.order)), key=want.order.__getitem__)
    return tensor.permute(want.order).contiguous().permute(inverse)


def _cast_to_plan(outputs: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Any]:
    """The outputs, in a low precision in the dtypes of the plan, whatever this device and this version of torch keep in
    full precision. `dtypes`: none where they stay as they are."""
    if not dtypes:
        return list(outputs)
    return [
        o.to(want) if o is not None and o.dtype is not want and o.is_floating_point() and want.is_floating_point else o
        for o, want in zip(outputs, dtypes)
    ]


def _laid_out_as(param: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the layout in which autograd adds up gradients, even if a function returned it in another one."""
    if gradient.stride() == param.stride():
        return gradient
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)


def _dinputs(kept: Kept, taken: set[int]) -> list[Tensor]:
    """Gradients of the inputs that require one, zeros for an input that none reached."""
    found = []
    for leaf in kept.leaves:
        grad = leaf.grad
        found.append(torch.zeros_like(leaf) if grad is None else with_own_storage(grad, taken))
    return found


def _own_parameters(spec: StageSpec, module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Give the module parameters without memory, to be bound; ties stay ties. Returns one name per parameter."""
    wanted = {p.name: p for p in spec.params}
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found: dict[str, nn.Parameter] = {}
    for aliases in names.values():
        known = [name for name in wanted if name in aliases]
        if not known:
            raise VerifyError(f"the module of {spec.name} has a parameter {aliases[0]!r} that its interface lacks")
        want = wanted[known[0]]
        param = nn.Parameter(torch.empty(0, dtype=getattr(torch, want.dtype), device=device), want.requires_grad)
        param.grad_dtype = getattr(torch, want.grad_dtype)  # autograd casts what it adds up
        for alias in aliases:
            path, _, key = alias.rpartition(".")
            setattr(module.get_submodule(path), key, param)
        found[known[0]] = param
    for member in module.modules():
        if isinstance(member, nn.RNNBase):  # a list of its own, and on a GPU weights in a buffer that it makes anew
            member._init_flat_weights()  # whenever they are others than in its last forward: not once they are bound
    missing = wanted.keys() - {name for aliases in names.values() for name in aliases}
    if missing:
        raise VerifyError(f"the module of {spec.name} lacks the parameter {min(missing)!r} of its interface")
    return {name: found[name] for name in wanted if name in found}


def _named_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and name at which each buffer is registered, by dotted name, with aliases."""
    places = {}
    for name, _ in module.named_buffers(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        places[name] = (module.get_submodule(path), key)
    return places
