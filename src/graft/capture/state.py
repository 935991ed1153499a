"""What a decoder keeps from one step to the next, by its own account, and whether graft carries it.

The graph is captured without a cache, and the engine carries two things between steps: the keys and values that each
graft::attention sees, and the state of recurrences that became ops of the graph (recurrence.py). So the module's own
cached decode (a prompt, then one more token) is run on tensors without numbers, and every tensor that it keeps has to
be keys or values of a cache layer that does nothing else with them, or to go through such a recurrence:

    past_key_values.layers[1].keys                DynamicLayer             carried
    past_key_values.layers[0].conv_states[0]      LinearAttentionLayer     carried where graft::causal_conv takes it
    cache_params.layers[0].recurrent_states[0]    LinearAttentionLayer     refused: Mamba 2
    past_key_values.linear_cache[0]               MiniMaxCache             refused
    state[2], mems[0]                             RWKV, XLNet              refused
    model.layers.0.temporal_block.conv1d_state    an attribute             refused: RecurrentGemma

Subclasses of these layers are refused until someone has looked at them: what they add is state too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.fx import GraphModule
from transformers import PreTrainedModel

from graft.base.errors import UnsupportedAttention, UnsupportedState
from graft.capture.kept import StateTensor, by_layer
from graft.capture.recurrence import KINDS, lost_recurrences, watched_recurrence
from graft.ir.io.symbols import fresh_mode
from graft.ir.nodes import calls, is_op
from graft.ir.trace import FAKE_TENSOR, quiet

Placement = Callable[[PreTrainedModel], AbstractContextManager[Callable[[Tensor], Tensor]]]
LENGTH = 5  # tokens of the prompt
LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device, torch.nn.Module)


def check_state(model: PreTrainedModel) -> list[StateTensor]:
    """What a cached decode of the model keeps, all of which graft carries; raises UnsupportedState for the rest."""
    kept = own_state(model)
    lost = [state for state in kept if not state.carried]
    if lost:
        raise unsupported(model, f"from step to step it keeps {'; '.join(by_layer(lost))}")
    return kept


def check_captured(model: PreTrainedModel, kept: Sequence[StateTensor], gm: GraphModule) -> None:
    """Everything kept has an op in the graph, through which graft carries it."""
    check_attentions(model, kept, sum(is_op(node, torch.ops.graft.attention.default) for node in calls(gm.graph)))
    lost = lost_recurrences(kept, gm)
    if lost is not None:
        raise unsupported(model, lost)


def check_attentions(model: PreTrainedModel, kept: Sequence[StateTensor], attentions: int) -> None:
    """Every layer with keys and values has an attention in the graph."""
    layers = [state for state in kept if state.name == "keys"]
    if not attentions:
        raise UnsupportedAttention(
            type(model).__name__,
            "it does not call Hugging Face's AttentionInterface, so no attention was captured",
        )
    if len(layers) > attentions:
        called = f"{attentions} call Hugging Face's AttentionInterface"
        raise unsupported(
            model, f"of {len(layers)} layers with keys and values {called} ({'; '.join(by_layer(layers))})"
        )


def unsupported(model: PreTrainedModel, problem: str) -> UnsupportedState:
    return UnsupportedState(
        f"{type(model).__name__} is not supported: {problem}. graft carries the keys and values of attention, and the"
        f" state of recurrent layers of {' and '.join(KINDS)}, and will not decode without the rest; use transformers"
        " for this model, or graft.compile(model, …) with its cache as an argument"
    )


def own_state(model: PreTrainedModel) -> list[StateTensor]:
    """Every tensor that the module's own decode takes from one step to the next.

    On the meta device (30 layers: about 1 s of a busy core), or, where the module looks at values there, on fake
    tensors (about 4 s).
    """
    problem: Exception | None = None
    for placement in (on_meta, on_fakes):
        try:
            return run_decode(model, placement)
        except Exception as error:  # noqa: BLE001  (whatever the model raises; if both ways do, it is told below)
            problem = error
    why = f"its own cached decode cannot be run on tensors without numbers ({type(problem).__name__}: {problem})"
    raise unsupported(model, why) from problem


def run_decode(model: PreTrainedModel, placement: Placement) -> list[StateTensor]:
    with torch.no_grad(), quiet(FAKE_TENSOR), plain_experts(model), unchanged(model) as changed:
        kept = decode(model, placement, use_cache=True)
        assigned = changed()
    if not assigned:
        return kept
    with torch.no_grad(), quiet(FAKE_TENSOR), plain_experts(model), unchanged(model) as changed:
        decode(model, placement, use_cache=False)
        always = {state.path for state in changed()}
    # what the module assigns in any case is no cache (tables of long rotations)
    return kept + [state for state in assigned if state.path not in always]


def decode(model: PreTrainedModel, placement: Placement, *, use_cache: bool) -> list[StateTensor]:
    """Runs a prompt and, with a cache, one more token; the tensors of what the module wants back in the next step."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    made: dict[int, Tensor] = {}  # a tied one is one tensor here too
    takes = inspect.signature(model.forward).parameters
    with placement(model) as without_numbers, watched_recurrence(model) as seen:
        tensors = {name: made.setdefault(id(t), without_numbers(t)) for name, t in named.items()}
        ids = torch.zeros((1, LENGTH), dtype=torch.int64)
        call: dict[str, Any] = {"input_ids": ids, "use_cache": use_cache}
        result = functional_call(model, tensors, (), call)
        back = {name: value for name, value in result.items() if name in takes and name not in call}
        kept = seen.mark(list(find_tensors(back, type(model))))
        if use_cache and all(state.carried for state in kept):
            result = functional_call(model, tensors, (), call | {"input_ids": ids[:, :1]} | back)
            back = {name: result[name] for name in back}
        return seen.mark(list(find_tensors(back, type(model))))


@contextmanager
def on_meta(_: PreTrainedModel) -> Iterator[Callable[[Tensor], Tensor]]:
    with torch.device("meta"):
        yield lambda tensor: tensor.detach().to("meta")


@contextmanager
def on_fakes(model: PreTrainedModel) -> Iterator[Callable[[Tensor], Tensor]]:
    mode = fresh_mode()
    mode.allow_non_fake_inputs = True  # tensors that are plain attributes of modules
    with torch.device(next(model.parameters()).device), mode:
        yield lambda tensor: mode.from_tensor(tensor, static_shapes=True)


def find_tensors(values: Mapping[str, Any], holder: type) -> Iterator[StateTensor]:
    """All tensors below these values, through containers and attributes of objects."""
    seen: set[int] = set()
    stack: list[tuple[Any, str, type, str]] = [(values, "", holder, "")]
    while stack:
        value, path, holder, name = stack.pop()
        if isinstance(value, Tensor):
            yield StateTensor(path, holder, name, tuple(value.shape))
        if isinstance(value, (Tensor, *LEAVES)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner = [(v, f"{path}[{k!r}]" if path else str(k), holder, name) for k, v in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            inner = [(v, f"{path}[{i}]", holder, name) for i, v in enumerate(value)]
        else:
            held = getattr(value, "__dict__", {})
            inner = [(v, f"{path}.{k}", type(value), k) for k, v in held.items()]
        stack += reversed(inner)


@contextmanager
def plain_experts(model: PreTrainedModel) -> Iterator[None]:
    """Experts by a batched matmul: torch's grouped one knows bfloat16 alone where there are no numbers."""
    before = getattr(model.config, "_experts_implementation", None)
    if before in (None, "batched_mm"):
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[Any]:
    """Afterwards every module has the attributes and buffers that it had; yields what tells the tensors assigned."""
    before = [(name, module, dict(vars(module)), dict(module._buffers)) for name, module in model.named_modules()]

    def changed() -> list[StateTensor]:
        found = []
        for path, module, attributes, buffers in before:
            for key, value in (*vars(module).items(), *module._buffers.items()):
                if isinstance(value, Tensor) and value is not attributes.get(key) and value is not buffers.get(key):
                    found.append(StateTensor(f"{path}.{key}" if path else key, type(module), key, tuple(value.shape)))
        return found

    try:
        yield changed
    finally:
        for _, module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
