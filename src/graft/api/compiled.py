"""What graft.compile gives back: a module over one or more captured graphs, with its state, checks and report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graft.api.call_form import MOST_KINDS, CallForm, GivenCall, calls_of, kind, order_text
from graft.api.func_transforms import refuse_func_transforms, transforms_around
from graft.api.functionalization import joined_record
from graft.api.gradients import detached_views, late_note, refuse_inputs, requiring, run_honoured, untrained
from graft.api.module_check import ModuleCheck
from graft.api.preallocated import run_into
from graft.api.restart import Restart
from graft.api.save import save_compiled
from graft.api.surroundings import ModeParts, Modes, mode_text, refuse_autocast, refuse_mode
from graft.api.variant import Variant, VariantSettings, build_variant, devices_of
from graft.backends.replay import Replays
from graft.backends.select import keep_sizes
from graft.base.errors import CaptureError, GuardFailed, OutRefused, ReplacedBuffer, UsageError
from graft.capture.containers import put_together
from graft.capture.dynamic import flat
from graft.capture.module import capture_module
from graft.capture.static_cache import allocate, find_caches, hand_back, pack, release
from graft.ir.program.identity import refuse_one_tensor_twice
from graft.ir.trace import use_level
from graft.memory.alias_map import Alias
from graft.memory.initial import Initial, initial_values, written_buffers
from graft.memory.io_table import IoTable
from graft.passes.library.fix_functionalization import NAME as FIX
from graft.passes.report import Report

log = logging.getLogger("graft")
MOST_VARIANTS = 16  # a program with more branches on sizes recompiles for ever
CAPTURING = threading.Lock()  # torch.export swaps parts of the module while it traces


class CompiledModule(torch.nn.Module):
    """A module that calls its transformed graph. State is shared with the module it was made from.

    A program may branch on the sizes that were left dynamic (`if x.shape[1] == 1`). The graph holds one way through
    it; a call that takes another way is captured when it is first made, and the report says so.
    """

    def __init__(
        self, variants: Sequence[Variant], form: CallForm, initial: Mapping[str, Initial], settings: VariantSettings
    ) -> None:
        super().__init__()
        self.graph_module = variants[0].graph_module
        self.variants = list(variants)
        self.settings = settings
        self.initial = dict(initial)
        self.form = form
        self._outside = torch.compiler.disable(self.call)
        self._source: tuple[torch.nn.Module, Any] | None = None  # the module and its dynamic_shapes; a tuple, so that
        self._caches: list[Any] = []  # it is not registered as a submodule
        self._sources: ModuleCheck | None = None  # what is shared with the module, or fixed in the graph, stays
        self.cache_count = 0  # StaticCaches among the arguments
        self._known: dict[tuple[Any, ...], Variant] = {}  # kinds of inputs that were checked
        self.carrying: dict[tuple[Any, ...], list[bool]] = {}  # kinds of inputs → which results carry gradients
        self.frozen = settings.frozen
        self.restart: Restart | None = None  # which input begins state anew
        self.untrained = untrained(self.graph_module, self.graph_module)
        self._warming = False
        self._parts: ModeParts | None = None  # modules whose modes decide what a graph computes
        self._devices: tuple[str, ...] | None = None  # kinds of devices, once they are known

    @property
    def report(self) -> Report:
        """The first variant's, with a note for each later one, and with what fix_functionalization did to all."""
        first = self.variants[0].report
        later = [note for variant in self.variants for note in variant.later()]
        first = replace(first, notes=(*first.notes, *later)) if later else first
        recorders = [variant.fix for variant in self.variants if variant.fix is not None]
        if not recorders:
            return first
        return replace(first, transforms={**first.transforms, FIX: joined_record(recorders)})

    @property
    def aliases(self) -> tuple[Alias, ...]:
        return tuple(dict.fromkeys(alias for variant in self.variants for alias in variant.aliases))

    @property
    def signature(self) -> IoTable:
        """Inputs, written state and results of the first variant: name, dtype, sizes, whose memory."""
        return self.variants[0].table

    @property
    def samples(self) -> bool:
        """Whether a graph of it samples random numbers."""
        return any(variant.samples for variant in self.variants)

    @property
    def source(self) -> torch.nn.Module:
        """The module that it was made from."""
        if self._source is None:
            raise UsageError("a loaded module does not have the module that it was made from")
        return self._source[0]

    @property
    def backend(self) -> str:
        return self.variants[0].backend

    @property
    def replays(self) -> Replays | None:
        """On the cuda_graph backend, the captures of the first variant: how many, why, what is copied for them."""
        return getattr(self.variants[0].call, "replays", None)

    def __getattr__(self, name: str) -> Any:
        """State under the names that it has in the module: `compiled.cache_k`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "graph_module" or name.startswith("__"):
                raise
            return getattr(super().__getattr__("graph_module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        graph_module = self.__dict__.get("_modules", {}).get("graph_module")
        if graph_module is not None and name in {**graph_module._buffers, **graph_module._parameters}:
            raise ReplacedBuffer(name, "parameter" if name in graph_module._parameters else "buffer")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> CompiledModule:
        raise UsageError("a compiled module is bound to its state and cannot be copied; save and load it, or compile")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a compiled module cannot be pickled; compiled.save(path) writes a folder for graft.load")

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:  # noqa: ARG002
        raise UsageError("a compiled module keeps its dtype and device; convert the module and compile it again")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._outside(args, kwargs)  # a graph break: what runs here checks its inputs, in Python
        return self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        devices = self._devices or devices_of(self.graph_module, pytree.tree_leaves((args, kwargs)))
        if not torch.compiler.is_exporting():  # a trace leaves no attributes behind
            self._devices = devices
        refuse_autocast(devices)
        out = kwargs.pop("out") if "out" in kwargs and not self.form.takes("out") else None
        if not torch.is_grad_enabled():
            return self.run(args, kwargs, out=out)
        if self.settings.grad == "honour":
            if out is not None:
                raise OutRefused("out", "holds no gradients, which grad='honour' gives; call it in torch.no_grad()")
            return run_honoured(self, args, kwargs)
        with torch.no_grad():
            return self.run(args, kwargs, detached=True, out=out)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, detached: bool = False, out: Any = None) -> Any:
        """`detached`: the caller has gradients on, and results carry none. `out`: memory for the results."""
        caches, fresh = [], []
        if self.cache_count:
            caches = find_caches((args, kwargs))
            fresh = self.prepare(caches)
            args, kwargs = pack(args, caches), pack(kwargs, caches)
        try:
            given = self.form.given(args, kwargs)
            values = given.values
            self.refuse_inputs(given)
            if torch.compiler.is_exporting():  # traces graft's ops, not their kernels
                if out is not None:
                    raise OutRefused("out", "is not for a call that torch.export traces; copy the results there")
                return self.traced(given)
            if detached:
                self.meet_gradients(self.ordered(self.variants[0], given))
            if self._sources is not None:
                self._sources()
            variant = self.choose(given)
            if self.restart is not None and self.restart.due(variant.names, values):
                self.reset()
            variant.check(values)
        except UsageError:
            release(fresh)
            raise
        if self.restart is not None:
            self.restart.note(variant.names, values)
        if out is not None:
            return run_into(variant, self.settings, values, out)
        result = variant.run(values, given.args, given.kwargs)
        if detached and variant.gives_views:
            result = detached_views(result)
        return hand_back(result, caches, variant.returned) if caches else result

    def refuse_inputs(self, given: GivenCall) -> None:
        """Raises for what no graph is for, whatever sizes it has."""
        if self.form.compares:
            refuse_one_tensor_twice(self.ordered(self.variants[0], given), self.variants[0].names, self.form.compares)
        if transforms_around():
            named = self.ordered(self.variants[0], given)
            refuse_func_transforms(named, self.variants[0].names, self.settings.grad)

    def traced(self, given: GivenCall) -> Any:
        """The graph for inputs of these sizes, for torch.export; its guards become those of the trace."""
        if self.cache_count:
            raise UsageError("a module compiled with a StaticCache is not traced again; trace the model itself")
        if self.restart is not None:
            raise UsageError("a module compiled with restart is not traced again: a graph cannot reset itself")
        found = self.fitting(given)
        if isinstance(found, GuardFailed):
            raise UsageError(f"{found}; call the compiled module with such sizes before it is traced")
        if isinstance(found, UsageError):
            raise found
        return put_together(found.graph_module(*given.args, **given.kwargs), found.results)

    def meet_gradients(self, values: list[Any]) -> None:
        """values: in the order of the first variant."""
        names = self.variants[0].names
        if self.settings.grad == "refuse":
            refuse_inputs(values, names)
        notes = [f"gradients of the input {name} are dropped, as asked" for name in requiring(values, names)]
        if late := [name for name, tensor in self.untrained if tensor.requires_grad]:
            self.untrained = [(name, tensor) for name, tensor in self.untrained if not tensor.requires_grad]
            notes.append(late_note(self.settings.grad, [*dict.fromkeys(late)]))
        if new := [note for note in notes if note not in self.report.notes]:
            self.variants[0] = replace(
                self.variants[0], report=replace(self.report, notes=(*self.report.notes, *new))
            )

    def prepare(self, caches: list[Any]) -> list[Any]:
        """Allocates caches that have no tensors yet; the layers that got some."""
        if len(caches) != self.cache_count:
            raise UsageError(f"compiled with {self.cache_count} caches, called with {len(caches)}")
        examples = self._caches or [None] * len(caches)
        return [layer for cache, known in zip(caches, examples, strict=True) for layer in allocate(cache, known)]

    def choose(self, given: GivenCall) -> Variant:
        """The variant for these inputs, captured now if the program takes a way that none holds."""
        kinds = (self.modes(), given.orders, *map(kind, given.values))
        if any(variant.signature.asks_offset for variant in self.variants):
            kinds += tuple(v.storage_offset() if isinstance(v, torch.Tensor) else None for v in given.values)
        known = self._known.get(kinds)
        if known is None:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            known = self._known[kinds] = self.find(given)
        return known

    def find(self, given: GivenCall) -> Variant:
        found = self.fitting(given)
        if isinstance(found, GuardFailed):
            return self.capture(given, found)
        if isinstance(found, UsageError):
            raise found
        return found

    def fitting(self, given: GivenCall) -> Variant | UsageError:
        """The variant that was captured for such inputs, or what is against the first one."""
        count, orders = len(given.values), given.orders
        problems: list[UsageError] = []
        modes, others = self.modes(), []
        for variant in self.variants:
            if count != len(variant.signature.leaves):
                return UsageError(f"compiled with {len(variant.signature.leaves)} inputs, called with {count}")
            same = variant.modes is None or variant.modes == modes
            try:
                variant.signature.check(self.ordered(variant, given))
            except UsageError as error:
                (problems if same else others).append(error)
            else:
                if variant.orders != orders:
                    others.append(GuardFailed(order_text(orders, variant.orders)))
                    continue
                if same:
                    return variant
                paths = self._parts.paths if self._parts else ("",) * len(modes)
                others.append(GuardFailed(mode_text(paths, modes, variant.modes or ())))
        return (problems or others)[0]

    def ordered(self, variant: Variant, given: GivenCall) -> list[Any]:
        """The inputs in the order that the variant has them in."""
        if variant.orders == given.orders:
            return given.values
        return flat(*self.form.in_order(given.args, given.kwargs, variant.orders))

    def modes(self) -> Modes:
        """Of the modules that ask for theirs, now."""
        if self._parts is not None:
            return self._parts.now()
        return (self.training,) * len(self.variants[0].modes or ())

    def train(self, mode: bool = True) -> CompiledModule:
        """Sets the mode of the module that it was made from; graphs are captured for each that is called."""
        if self._source is not None:
            self._source[0].train(mode)
        else:
            refuse_mode(mode, [variant.modes for variant in self.variants])
        self.training = mode
        return self

    def capture(self, given: GivenCall, why: GuardFailed) -> Variant:
        if self._source is None:
            raise UsageError(
                f"{why}; a loaded module or an exported program cannot be captured again. Call it so"
                " before saving, or compile the module"
            )
        if self.frozen:
            raise UsageError(
                f"{why}, and the module is frozen with {len(self.variants)} variants; compiled.warm([…]) captures"
                " others before compiled.freeze()"
            )
        if len(self.variants) == MOST_VARIANTS:
            raise UsageError(
                f"{why}, and {MOST_VARIANTS} variants are captured already; make sizes static, or keep keys in order"
            )
        module, dynamic_shapes = self._source
        try:
            with CAPTURING, use_level(self.settings.level):
                captured = capture_module(
                    module,
                    given.args,
                    given.kwargs,
                    dynamic_shapes,
                    containers=self.form.containers,
                    caches=self._caches,
                    branch=True,
                    keep_sizes=partial(keep_sizes, self.settings.backend),
                )
        except CaptureError as error:
            raise UsageError(f"{why}, and the program cannot be captured for these inputs: {error}") from error
        variant = build_variant(captured, self.settings, self.report.model, given.values)
        variant = replace(variant, made_by=str(why), modes=self.modes(), orders=given.orders)
        self.variants.append(variant)
        if self._sources is not None:
            self._sources.watch_memory(module, [known.graph_module for known in self.variants])
        self.variants[0] = replace(self.variants[0], report=self.joined_report(variant, why))
        self.initial |= initial_values(variant.graph_module, self.initial)
        return variant

    def joined_report(self, variant: Variant, why: GuardFailed) -> Report:
        """The report with what the latest variant adds to it."""
        first, number = self.report, len(self.variants)
        note = f"variant {number} was captured when it was {'warmed' if self._warming else 'called'}: {why}"
        log.info(note)
        others = [f"variant {number}: {text}" for text in variant.report.notes if text not in first.notes]
        known = {(record.input, record.kind, record.how) for record in first.state}
        state = [record for record in variant.report.state if (record.input, record.kind, record.how) not in known]
        return replace(first, notes=(*first.notes, note, *others), state=(*first.state, *state))

    def freeze(self) -> None:
        """From now on a call that takes another way through the program is an error; `warm` alone captures."""
        self.frozen = True

    @torch.no_grad()
    def warm(self, calls: Sequence[tuple[Any, ...] | Mapping[str, Any]]) -> None:
        """Captures what these calls need, each a tuple of arguments or a dict of keyword arguments; runs none. The
        sizes of a tensor, as a tuple or a torch.Size, stand for one."""
        if self.cache_count:
            raise UsageError(
                "a module compiled with a StaticCache is warmed by calling it: caches set their own sizes"
            )
        frozen, self.frozen, self._warming = self.frozen, False, True
        try:
            for args, kwargs in calls_of(calls):
                examples = self.form.examples(args, kwargs, self.variants[0].signature.leaves)
                self.choose(self.form.given(*examples))
        finally:
            self.frozen, self._warming = frozen, False

    @torch.no_grad()
    def reset(self) -> None:
        """Gives every buffer that the program writes the value it had when the module was compiled."""
        for variant in self.variants:
            for name, tensor in written_buffers(variant.graph_module).items():
                self.initial[name].put(tensor)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes a folder that `graft.load` reads in a new process; state is saved as it is now."""
        save_compiled(self, path, overwrite=overwrite)
