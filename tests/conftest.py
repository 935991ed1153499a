"""Shared fixtures: quiet libraries, tiny models built once, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial, wraps
from importlib.util import find_spec
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import typer.testing
from _pytest.assertion.rewrite import AssertionRewritingHook


def rewrite_no_packages() -> None:
    """pytest rewrites the asserts of every package that has a plugin, in each process of a run without bytecode: 800
    files of graft and hypothesis that no test asserts in, a third of the time that it takes to collect."""
    for hook in sys.meta_path:
        if isinstance(hook, AssertionRewritingHook):
            hook._must_rewrite -= {"graft", "hypothesis", "anyio"}
            hook._marked_for_rewrite_cache.clear()
            hook.mark_rewrite("graft.testing")


rewrite_no_packages()

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal import charmap  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402
from hypothesis.internal.intervalsets import IntervalSet  # noqa: E402

from bytecode import rewrite_files  # noqa: E402
from fork_parent import fork_workers, forks  # noqa: E402
from graft.models.registry import families  # noqa: E402
from interpreter import patch_once  # noqa: E402
from marks import FULL, keep_some, thin_out  # noqa: E402
from module_patches import patch_modules_directly  # noqa: E402

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule

    from graft.engine.llm import LLM
    from graft.models.load import LoadedModel

# torch and transformers are imported where they are used: the process that only hands tests to others does without
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a model is captured once in a run, by whichever process comes first; test_stored_graphs holds that a stored graph is
# the captured one. The folder is this run's own: its first process makes it, and the workers inherit the name.
OWN_GRAPHS = "" if os.environ.get("GRAFT_GRAPH_CACHE_DIR") else tempfile.mkdtemp(prefix="graft-graphs-")
os.environ["GRAFT_GRAPH_CACHE_DIR"] = OWN_GRAPHS or os.environ["GRAFT_GRAPH_CACHE_DIR"]
# the same for engines that starts keep, and for the C++ that tests compile
OWN_ENGINES = "" if os.environ.get("GRAFT_ENGINE_CACHE_DIR") else tempfile.mkdtemp(prefix="graft-engines-")
os.environ["GRAFT_ENGINE_CACHE_DIR"] = OWN_ENGINES or os.environ["GRAFT_ENGINE_CACHE_DIR"]
OWN_BUILDS = "" if os.environ.get("GRAFT_TEST_BUILDS") else tempfile.mkdtemp(prefix="graft-native-test-")
os.environ["GRAFT_TEST_BUILDS"] = OWN_BUILDS or os.environ["GRAFT_TEST_BUILDS"]
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the CPU's instruction sets are not tried out in each process
# native code is kept from run to run, also where a test has a cache of its own: its name has all that it depends on
os.environ.setdefault("GRAFT_NATIVE_CACHE_DIR", os.path.expanduser("~/.cache/graft/native-tests"))
os.environ["GRAFT_NO_CHECK_CACHE"] = "1"  # a check that a test asks for is made; test_stored_checks turns it on
os.environ |= {"NO_COLOR": "1", "COLUMNS": "160"}  # what the commands print, whatever the terminal
warnings.filterwarnings("ignore")


def known_intervals(found: Any, codec: str) -> Any:
    """Characters that the codec encodes, and those of them that it decodes to others."""
    return (
        (IntervalSet([(0, 0xD7FF), (0xE000, sys.maxunicode)]), IntervalSet([])) if codec == "utf-8" else found(codec)
    )


# the same examples in every run, so that a change is judged by what it changed; `make fuzz` draws new ones
# no test depends on the clock: a busy machine may take seconds over what takes milliseconds here
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", PATIENT, derandomize=True, max_examples=25)
settings.register_profile("all", PATIENT, derandomize=True)
settings.register_profile("fuzz", PATIENT, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if not FULL:
    # hypothesis also draws numbers and texts that stand in the source of whatever is imported: examples would follow
    # from what a process ran before, and from lines that have nothing to do with the test; and 1,000 files are parsed
    providers._get_local_constants = lambda: providers._local_constants
    # what a text may have by default: hypothesis encodes all of Unicode to know, 8 core-seconds
    charmap.intervals_from_codec = partial(known_intervals, charmap.intervals_from_codec)

# the kit comes with graft when that is installed; from a checkout it is named here (under the same name: never twice)
pytest_plugins = ["graft.testing.plugin", "pytester", "document_schemas"]
FAMILIES = sorted(families())


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # tests run in other processes
    rewrite_no_packages()  # in a forked process this file is there already
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        # a run in the background of a shell ignores Ctrl-C, and so would what tests send it to
        signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        patch_once()
    transformers.utils.logging.disable_progress_bar()
    build_commands_once()
    measure_nothing()
    patch_modules_directly()
    if not FULL:
        sweep_tiles()
        forget_open_sizes()
    transformers.utils.logging.set_verbosity_error()


def build_commands_once() -> None:
    """The command line of an app is made of its verbs' signatures once in a run, not for each command that a test
    runs: 60 ms, and 300 tests run some."""
    if not hasattr(typer.main.get_command, "cache_info"):  # by the process that this one was forked from
        typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]


def measure_nothing() -> None:
    """pytest listens to loggers that hand nothing up, among them torch's structured trace, which then has every graph
    written down as text: 3 % of the run. And Dynamo times the guards of each graph, with the CPU's caches emptied
    first: 30 ms, 1.4 %."""
    import torch._dynamo.guards

    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()  # torch's own would take itself out at the first record, which its parent would print
    timed = torch._dynamo.guards.profile_guard_manager
    torch._dynamo.guards.profile_guard_manager = wraps(timed)(lambda *_: 0.0)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def timed_guards() -> Iterator[None]:
    """Dynamo times guards, as it does outside of tests."""
    import torch._dynamo.guards

    with pytest.MonkeyPatch.context() as patch:
        timed = unwrap(torch._dynamo.guards.profile_guard_manager)
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", timed)
        yield


def sweep_tiles() -> None:
    """Numeric checks of the short run sweep the sizes beside tiles, not all up to 130: `graft check` takes half the
    time. What holds that every one is tried asks for `every_size`."""
    from graft.passes.numeric import sizes

    sizes.SWEEP = [n for n in sizes.SWEEP if n < 5 or any(abs(n - tile) < 2 for tile in (8, 16, 32, 64, 128))]


def forget_open_sizes() -> None:
    """What fake tensors of open sizes gave is not kept for calls that come again: in a model of two layers few do,
    and a capture takes 2.3 core-seconds without, 3.3 with it. The long run keeps it; the graphs are the same."""
    from torch._subclasses import FakeTensorMode

    made = FakeTensorMode.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.cache_enabled = self.cache_enabled and self.shape_env is None

    FakeTensorMode.__init__ = init  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def every_size() -> Iterator[None]:
    """Numeric checks sweep as they do for users."""
    from graft.passes.numeric import sizes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "SWEEP", range(1, sizes.SWEPT + 1))
        yield


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Dynamo and Inductor have nothing from before, and keep nothing; no gradients."""
    import torch

    from graft.backends.inductor import reset_compiler
    from graft.backends.inductor_caches import without_caches

    reset_compiler()
    with without_caches(), torch.no_grad():
        yield
    reset_compiler()


@cache
def tiny(family: str, dtype: str = "float32") -> LoadedModel:
    """A tiny model of a family. Shared: tests that rewrite weights load their own."""
    from graft.models.load import load_model

    return load_model(f"tiny-{family}", dtype=dtype, device="cpu")


@cache
def embedded() -> LLM:
    """The embedded model in float32, loaded once a process. Shared: a test that changes it undoes that."""
    from graft.engine.llm import LLM

    return LLM("smollm2-135m", dtype="float32", device="cpu", keep_weights=True)


def graph_of(module: torch.nn.Module) -> GraphModule:
    """What capture_decoder gives, exported once in a run for equal models; test_stored_graphs: it is the same."""
    from graft.capture.cache import captured_decoder

    return captured_decoder(module)[0]


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Workers are forked from one process that has collected; asserts are rewritten while that imports torch."""
    if forks():
        config.add_cleanup(fork_workers(specs, [*map(str, config.invocation_params.args)]))
    rewrite_files(config)


def pytest_unconfigure() -> None:
    for folder in filter(None, (OWN_GRAPHS, OWN_ENGINES, OWN_BUILDS)):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a fifth of the time a worker waits, for a program it started or for a socket."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked exhaustive
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Matrices thinned out; the longest first, so that no worker is left alone with one at the end."""
    thin_out(items)
    keep_some(items)
    longest = ("test_write_a_transform", "test_state_programs", "test_soak", "test_engine", "test_smollm2")
    items.sort(key=lambda item: longest.index(item.path.stem) if item.path.stem in longest else len(longest))


def pytest_collection_finish() -> None:
    """What was imported stays for the whole run: the garbage collector need not look at half a million objects again
    and again, nor for garbage after every 700 new ones, of which a traced graph makes thousands. Saves a quarter."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What outlives a file (captured graphs, engines, what torch keeps) is frozen, too: a collection that a test asks
    for took seconds in a process that was through with a thousand others."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def resized(llm: LLM, **options: Any) -> LLM:
    """The same graph with an engine of another size: capturing the model once more would take seconds."""
    from graft.engine.options import EngineOptions
    from graft.engine.setup.build import build_engine

    other = copy.copy(llm)
    other.engine, _ = build_engine(
        llm.engine.graph, llm.model, llm.cache.layers, llm.engine.manager.block_size, EngineOptions(**options),
        llm.device, content=llm.cache.content, states=llm.cache.states,
    )  # fmt: skip
    return other


@pytest.fixture
def generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(0)
