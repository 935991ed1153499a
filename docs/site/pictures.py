"""Writes docs/pictures/*.svg.

python docs/site/pictures.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from svg import AMBER, BLUE, GREEN, GREY, INK, MUTED, VIOLET, Drawing

FOLDER = Path(__file__).parents[1] / "pictures"


def layer() -> Drawing:
    """One Llama layer, as captured in bfloat16 and as a decode step on a GPU runs it."""
    d = Drawing(840, 560, "One Llama layer before and after: 38 compute nodes become 5")
    d.text(24, 32, "captured", size=15, bold=True)
    d.text(110, 32, "38 compute nodes", colour=MUTED)
    d.text(520, 32, "after the pipeline", size=15, bold=True)
    d.text(678, 32, "5 compute nodes", colour=MUTED)
    rows: list[tuple[int, tuple[str, ...], tuple[str, str]]] = [
        (54, ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"), AMBER),
        (90, ("linear q", "linear k", "linear v"), BLUE),
        (146, ("mul", "neg", "cat", "mul", "add"), VIOLET),
        (182, ("mul", "neg", "cat", "mul", "add"), VIOLET),
        (218, ("attention",), VIOLET),
        (274, ("linear o", "add"), BLUE),
        (330, ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"), AMBER),
        (366, ("linear gate", "linear up"), BLUE),
        (402, ("silu", "mul"), GREEN),
        (458, ("linear down", "add"), BLUE),
    ]
    for y, names, colour in rows:
        x = 24.0
        for name in names:
            width = max(44, 7.3 * len(name) + 12)
            d.box(x, y, width, 26, name, GREY if name == "add" and colour is BLUE else colour, mono=True, size=12)
            if x > 24 and "linear q" not in names and "linear up" not in names:
                d.arrow((x - 10, y + 13), (x - 1, y + 13))
            x += width + 11
    labels = [
        (54, 116, "fused_linear", "norm → qkv", "fuse_norm_into_matvec, merge_qkv"),
        (
            146,
            244,
            "rope_attention",
            "rotate, write the KV cache, attend",
            "insert_kv_cache, fuse_rope_into_attention",
        ),
        (274, 300, "fused_linear", "o + residual", "fuse_residual_into_matvec"),
        (330, 428, "fused_linear", "norm → gate, up → silu · mul", "fuse_norm_…, fuse_swiglu_into_matvec"),
        (458, 484, "fused_linear", "down + residual", "fuse_residual_into_matvec"),
    ]
    for top, bottom, op, what, by in labels:
        middle = (top + bottom) / 2
        d.parts.append(
            f'<path d="M472 {top} h8 v{bottom - top} h-8" fill="none" stroke="#9ca3af" stroke-width="1.4"/>'
        )
        d.arrow((480, middle), (517, middle))
        colour = VIOLET if op == "rope_attention" else BLUE
        d.box(520, middle - 22, 300, 44, f"graft.{op}", colour, note=what, mono=True)
        d.text(820, middle + 35, by, size=10, colour=MUTED, anchor="end")
    mids = [(top + bottom) / 2 for top, bottom, *_ in labels]
    for first, second in pairwise(mids):
        d.arrow((556, first + 22), (556, second - 23))
    d.text(
        24, 534, "Llama in bfloat16; views (reshape, transpose, slice) are free and not drawn.", size=12, colour=MUTED
    )
    words = "Every merge is a named transform with its matches, near misses and checks in the report."
    d.text(24, 550, words, size=12, colour=MUTED)
    return d


def packages() -> Drawing:
    """Who may import whom."""
    d = Drawing(760, 430, "Package layers: imports go downwards only")
    layers: list[tuple[str, tuple[str, ...], tuple[str, str]]] = [
        ("commands", ("cli",), GREY),
        ("tools", ("workbench", "bench", "testing", "stages"), GREEN),
        ("what users call", ("api", "engine"), BLUE),
        ("graph in, program out", ("capture", "passes", "backends", "models"), VIOLET),
        ("memory and kernels", ("memory", "ops", "weights"), AMBER),
        ("FX graphs", ("ir",), GREY),
        ("errors, files, memory", ("base",), GREY),
    ]
    for number, (what, names, colour) in enumerate(layers):
        y = 24 + 56 * number
        d.text(20, y + 25, what, colour=MUTED)
        width = (560 - 10 * (len(names) - 1)) / len(names)
        for index, name in enumerate(names):
            d.box(180 + index * (width + 10), y, width, 40, name, colour, mono=True)
        if number:
            d.arrow((460, y - 16), (460, y - 1))
    d.text(
        180, 420, "Imports go downwards only; import-linter contracts hold that in make check.", size=12, colour=MUTED
    )
    return d


def life() -> Drawing:
    """From a checkpoint to tokens."""
    d = Drawing(880, 330, "Life of a model")
    top = [
        ("checkpoint", "HF folder, .gguf, name", GREY),
        ("nn.Module", "models/load.py", GREY),
        ("exported graph", "capture/", BLUE),
        ("normal form", "ir/canonical", BLUE),
    ]
    for number, (name, note, colour) in enumerate(top):
        x = 20 + 228 * number
        d.box(x, 24, 144, 48, name, colour, note=note)
        if number:
            verb = ("load", "capture", "canonicalize")[number - 1]
            d.arrow((x - 84, 48), (x - 2, 48))
            d.text(x - 43, 41, verb, size=10, colour=MUTED, anchor="middle")
    d.box(12, 116, 844, 108, "", ("#faf5ff", "#7c3aed"), dashed=True)
    d.text(40, 142, "transform pipeline: passes/pipeline.py", size=12, colour="#7c3aed", bold=True)
    stages = [
        ("match", "named ops"), ("fuse", "fewer, larger ops"), ("state", "KV cache as inputs"),
        ("schedule", "decode fusions, streams"),
    ]  # fmt: skip
    for number, (name, note) in enumerate(stages):
        x = 40 + 204 * number
        d.box(x, 162, 176, 48, name, VIOLET, note=note, mono=True)
        if number:
            d.arrow((x - 28, 186), (x - 2, 186))
    d.arrow((776, 72), (776, 98), (28, 98), (28, 186), (38, 186))
    d.text(
        828,
        142,
        "each transform: snapshot · rewrite · verify · record, or roll back",
        size=11,
        colour=MUTED,
        anchor="end",
    )
    d.box(320, 268, 240, 46, "backend", AMBER, note="eager · inductor · cuda_graph · native")
    d.box(20, 268, 200, 46, "CompiledModule", GREEN, note="graft.compile, any module")
    d.box(640, 268, 216, 46, "graft.LLM", GREEN, note="+ KV cache, scheduler, sampler")
    d.arrow((740, 210), (740, 244), (440, 244), (440, 266))
    d.text(452, 260, "lower", size=10, colour=MUTED)
    d.arrow((320, 291), (222, 291))
    d.arrow((560, 291), (638, 291))
    return d


def kv_blocks() -> Drawing:
    """How a kernel finds the key of a token."""
    d = Drawing(880, 400, "From a token to its slot in the paged KV cache")
    d.text(20, 30, "1  tokens of request A", bold=True)
    for token in range(5):
        d.box(20 + 56 * token, 42, 50, 30, str(32 + token), BLUE if token == 4 else GREY, size=12)
    d.text(20, 92, "position 36 is new: entry 36 // 16 = 2", size=12, colour=MUTED)
    d.text(20, 108, "of the table, offset 36 % 16 = 4", size=12, colour=MUTED)
    d.text(20, 140, "2  block_tables, a row a sequence", bold=True)
    for row, (name, blocks) in enumerate((("A", (7, 3, 9)), ("B", (7, 5, 7)))):
        y = 152 + 40 * row
        d.text(24, y + 20, name, mono=True)
        for column, block in enumerate(blocks):
            new = (row, column) == (0, 2)
            pad = (row, column) == (1, 2)
            shared = column == 0
            colour = BLUE if new else GREEN if shared else GREY
            d.box(44 + 60 * column, y, 54, 30, str(block), colour, size=12, dashed=pad)
    d.text(20, 250, "block 7 holds a prefix that both requests share", size=12, colour=MUTED)
    d.text(20, 288, "3  slot_mapping", bold=True)
    d.box(20, 300, 260, 34, "slot = 9 × 16 + 4 = 148", BLUE, mono=True)
    d.text(20, 354, "where the new key and value are written; seq_lens and", size=12, colour=MUTED)
    d.text(20, 370, "cu_seqlens say how far each sequence reads", size=12, colour=MUTED)
    d.text(400, 30, "4  k_cache_i, v_cache_i: [blocks, 16, kv_heads, head_dim]", bold=True)
    for index, block in enumerate((3, 5, 7, 9)):
        y = 44 + 44 * index
        d.text(400, y + 20, f"block {block}", size=12, mono=True)
        colour = GREEN if block == 7 else GREY
        for slot in range(16):
            written = block == 9 and slot == 4
            free = (block == 9 and slot > 4) or (block == 5 and slot > 9)
            fill = BLUE if written else ("#ffffff", "#d1d5db") if free else colour
            d.box(470 + 24 * slot, y + 3, 21, 24, "", fill)
    d.text(400, 248, "5  kernel: graft.rope_attention, one launch a layer", bold=True)
    d.box(400, 262, 454, 60, "", VIOLET)
    d.text(414, 284, "write k, v of token 36 to slot 148", size=12, mono=True)
    d.text(414, 306, "for each block in block_tables[A]: attend to its keys", size=12, mono=True)
    d.text(400, 346, "The caches are inputs of the graph, written in place; hazard analysis", size=12, colour=MUTED)
    d.text(400, 362, "proves the order of reads and writes. The block manager allocates,", size=12, colour=MUTED)
    d.text(400, 378, "shares and evicts blocks; a kernel sees only tables and slots.", size=12, colour=MUTED)
    d.arrow((218, 167), (300, 167), (300, 191), (396, 191))
    d.arrow((280, 317), (340, 317), (340, 292), (398, 292))
    return d


def timeline() -> Drawing:
    """The host prepares a step while the GPU runs the one before it."""
    d = Drawing(880, 250, "Two decode steps: the host runs one step ahead of the GPU")
    d.text(20, 74, "host", bold=True)
    d.text(20, 174, "GPU", bold=True)
    for y in (96, 196):
        d.line(70, y, 860, y)
    d.box(80, 50, 70, 36, "launch t", BLUE, size=12)
    d.box(154, 50, 84, 36, "launch t+1", GREEN, size=12)
    d.box(242, 50, 108, 36, "wait for t", ("#ffffff", "#9ca3af"), size=12, dashed=True)
    d.box(354, 50, 104, 36, "process t", BLUE, size=12)
    d.box(462, 50, 84, 36, "launch t+2", AMBER, size=12)
    d.box(550, 50, 90, 36, "wait for t+1", ("#ffffff", "#9ca3af"), size=12, dashed=True)
    d.box(644, 50, 104, 36, "process t+1", GREEN, size=12)
    d.box(752, 50, 84, 36, "launch t+3", GREY, size=12)
    d.box(116, 150, 232, 36, "step t: model, sampling", BLUE, size=12)
    d.box(350, 150, 288, 36, "step t+1: reads t's tokens on the device", GREEN, size=12)
    d.box(640, 150, 200, 36, "step t+2", AMBER, size=12)
    d.arrow((116, 86), (116, 148))
    d.arrow((196, 86), (196, 120), (354, 120), (354, 148))
    d.arrow((504, 86), (504, 120), (644, 120), (644, 148))
    d.arrow((346, 150), (356, 88), dashed=True)
    d.arrow((636, 150), (646, 88), dashed=True)
    d.text(80, 34, "Engine.step(): launch the next step, then look at the tokens of this one", size=12, colour=INK)
    words = "Solid: a CUDA-graph launch, queued behind the step in flight. Dashed: tokens, written to the host."
    d.text(70, 222, words, size=11, colour=MUTED)
    d.text(
        70,
        240,
        "A request that ends in step t is dropped when t is processed; its token of t+1 is thrown away.",
        size=11,
        colour=MUTED,
    )
    return d


PICTURES = {
    "layer": layer,
    "packages": packages,
    "life_of_a_model": life,
    "kv_blocks": kv_blocks,
    "decode_steps": timeline,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
