"""`graft run --compare`: the rate of Hugging Face eager, and whether the logits are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graft.engine.llm import LLM
    from graft.models.loaded import LoadedModel
    from graft.workbench.compare.engine import EngineComparison


@dataclass(frozen=True)
class ComparedModel:
    """What the engine was asked for, as far as its graphs in other dtypes depend on it. With a dtype that was named
    there are none in others, as in `graft check`."""

    model: str
    config: str | None = None
    sets: Sequence[str] = ()
    plugins: Sequence[str] = ()
    quantize: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"

    def load(self, dtype: str) -> LoadedModel:
        from graft.models.load import load_model

        return load_model(self.model, dtype=dtype, device="cpu", trust_remote_code=self.trust_remote_code)


def measure(
    llm: LLM, prompts: Sequence[Any], asked: ComparedModel
) -> tuple[dict[str, float], EngineComparison | None]:
    """Decoding rates of this run. With prompts, also of Hugging Face eager on as many copies of the first one, and
    how right the logits of that are."""
    speeds = {"graft": llm.stats.decode_rate}
    if not prompts:
        return speeds, None
    from graft.bench.baselines.hf import hugging_face_rate
    from graft.cli.show import progress_bar
    from graft.engine.setup.stages import settings_for
    from graft.workbench.compare.engine import DTYPES, compare_engine

    settings = settings_for(llm.model, asked.config, asked.quantize, sets=asked.sets, plugins=asked.plugins)
    with progress_bar() as progress:
        progress("timing Hugging Face eager", 0, 1)
        ids, batch = llm.encode(prompts[0]), len(prompts)
        speeds["hugging_face_eager"] = hugging_face_rate(llm.model, ids, llm.stats.new_tokens // batch, batch)
        return speeds, compare_engine(
            llm, ids, asked.load, settings, progress, DTYPES if asked.dtype == "auto" else ()
        )


def show_comparison(found: EngineComparison) -> None:
    from graft.cli.show import out

    for text in found.lines():
        out.print(text, markup=False, soft_wrap=True)
    for text in found.failures:
        out.print(f"wrong: {text}", style="red", markup=False, soft_wrap=True)
