"""What ``qcompile bench`` understands.

Comes in: the commands of the command line. Goes out: one more, with a benchmark for each part.
Always holds: every benchmark has ``--quick``, ``--json``, ``--markdown`` and ``--urgent``.
"""

from __future__ import annotations

from qcompile.cli.command import FILE, Commands, Lazy, Parser, command

_EXACT_OR_FAST = "exact, or fast: int8 activations"


def add_bench(commands: Commands) -> None:
    """Add ``bench`` and its parts."""
    examples = """
        qcompile bench model model.gguf --quick
        qcompile bench kernels --quick --against none
        qcompile bench transforms q4_k q6_k
        qcompile bench compile model.gguf
        qcompile bench experts --tokens 1,128
    """
    about = "measure a model, kernels, repacking or compiling, beside peers"
    made = command(commands, "bench", about, examples, Lazy("bench", "run_kernels"))
    parts = made.add_subparsers(required=True, metavar="WHAT")
    for add in (_model, _kernels, _transforms, _compile, _experts):
        add(parts)


def _model(commands: Commands) -> None:
    examples = """
        qcompile bench model model.gguf
        qcompile bench model model.gguf --quick --against none --exported
        qcompile bench model model.gguf --against llama.cpp --numerics fast --markdown table.md
        qcompile bench model folder --against transformers --batch 1,4 --json run.json --plots .
    """
    about = "speed, memory and outputs of a model beside peers, in turns"
    made = command(commands, "model", about, examples, Lazy("bench", "run_model"))
    made.add_argument("file", help=FILE)
    made.add_argument(
        "--device", default="cpu", metavar="TARGET", help="cpu, cuda, ...; peers run on a CPU only"
    )
    made.add_argument(
        "--against",
        metavar="PEERS",
        help="llama.cpp,transformers (the default), torchao, gptqmodel, some of them, or none;"
        " QCOMPILE_LLAMA_CPP_PYTHON, QCOMPILE_PEERS_PYTHON and QCOMPILE_GPTQMODEL_PYTHON name the"
        " interpreters that have llama-cpp-python, torchao and gptqmodel",
    )
    made.add_argument(
        "--prompt-tokens", metavar="N,N", help="tokens of a prompt (512), or several lengths"
    )
    made.add_argument("--batch", default="1", metavar="N,N", help="sequences at once (1)")
    _numbers(
        made,
        ("--tokens", "tokens that follow (64)"),
        ("--compared", "tokens of text on which outputs are compared (128), or 0"),
    )
    made.add_argument("--dtype", default="float32", metavar="DTYPE", help="of our activations")
    made.add_argument("--numerics", default="exact", metavar="NAME", help=_EXACT_OR_FAST)
    made.add_argument(
        "--exported", action="store_true", help="also measure the model as qcompile export saves it"
    )
    _common(made, "fewer and shorter rounds, llama.cpp alone", "throughput by batch and length")


def _kernels(commands: Commands) -> None:
    examples = """
        qcompile bench kernels --quick
        qcompile bench kernels model.gguf --against ggml
        qcompile bench kernels --formats "4-bit g128,q4_k" --shapes 4096x14336 --rows 1,512
        qcompile bench kernels --kernel cpu.panel_linear_int8 --markdown table.md --plots .
        qcompile bench kernels --aot --arch sm90 --only "w4 g128"
    """
    about = "kernels on weights of all formats beside peers, memory and torch's float products"
    made = command(commands, "kernels", about, examples, Lazy("bench", "run_kernels"))
    made.add_argument("file", nargs="?", help=f"{FILE}, whose weights are then measured")
    made.add_argument("--device", default="cpu", metavar="TARGET", help="cpu, cpu:avx2, ...")
    made.add_argument("--kernel", default="", metavar="NAMES", help="kernels to time (all)")
    made.add_argument(
        "--numerics", default="exact,fast", metavar="NAMES", help="whose kernels (exact,fast)"
    )
    made.add_argument("--formats", metavar="NAMES", help='of weights, such as "4-bit g32,q4_k"')
    made.add_argument("--shapes", metavar="NxK,NxK", help="of weights (4096x14336,14336x4096)")
    made.add_argument("--rows", metavar="M,M", help="of activations (1,8,64,512)")
    made.add_argument(
        "--against",
        metavar="PEERS",
        help="some of torch, torch-dynamic, torchao, auto-round-lib, bitsandbytes,"
        " optimum-quanto, ggml, ggml-plain, or none (all); QCOMPILE_PEERS_PYTHON names the"
        " interpreter that has the packages, QCOMPILE_LLAMA_CPP_PYTHON the one with"
        " llama-cpp-python",
    )
    made.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="of our activations")
    made.add_argument("--aot", action="store_true", help="what kernels for a GPU need, compiled")
    made.add_argument("--arch", action="append", metavar="ARCH", help="with --aot: sm80, sm90, ...")
    made.add_argument("--only", default="", metavar="TEXT", help="with --aot: cases named so")
    _common(
        made,
        "two formats, one shape, three peers, fewer rounds",
        "the roofline, and speed against rows",
    )


def _transforms(commands: Commands) -> None:
    examples = """
        qcompile bench transforms --quick
        qcompile bench transforms q4_k q6_k "gptq 4-bit"
        qcompile bench transforms --json figures.json
    """
    about = "how fast stored weights become a kernel's, beside numpy and ggml"
    made = command(commands, "transforms", about, examples, Lazy("bench", "run_transforms"))
    made.add_argument("formats", nargs="*", metavar="format", help="formats (all that have edges)")
    made.add_argument("--shape", metavar="NxK", help="of weights (4096x14336)")
    made.add_argument(
        "--ggml", metavar="FILE", help="libggml-base; else that of QCOMPILE_LLAMA_CPP_PYTHON"
    )
    _common(made, "five formats, smaller weights", "")


def _compile(commands: Commands) -> None:
    examples = """
        qcompile bench compile --quick
        qcompile bench compile model.gguf
        qcompile bench compile --layers 2,4,8,16 --markdown table.md
    """
    about = "seconds of each stage and pass, and how they grow with layers"
    made = command(commands, "compile", about, examples, Lazy("bench", "run_compile"))
    made.add_argument("file", nargs="?", help=f"{FILE}; without it models of --layers are written")
    made.add_argument("--layers", metavar="N,N", help="of the models that are written (2,4,8,16)")
    made.add_argument("--dtype", default="float32", metavar="DTYPE", help="of activations")
    made.add_argument("--numerics", default="exact", metavar="NAME", help=_EXACT_OR_FAST)
    _common(made, "2 and 8 layers, one round", "")


def _experts(commands: Commands) -> None:
    examples = """
        qcompile bench experts --quick
        qcompile bench experts --tokens 1,16,128 --markdown table.md
    """
    about = "a layer of experts beside transformers' own on bfloat16 weights"
    made = command(commands, "experts", about, examples, Lazy("bench", "run_experts"))
    made.add_argument("--tokens", metavar="N,N", help="tokens of a call (1,128)")
    _common(made, "one format, a quarter of the experts", "")


def _numbers(made: Parser, *options: tuple[str, str]) -> None:
    for name, about in options:
        made.add_argument(name, type=int, metavar="N", help=about)


def _common(made: Parser, quick: str, plots: str) -> None:
    _numbers(
        made,
        ("--rounds", "rounds of turns (5)"),
        ("--threads", "threads of each contender (all cores)"),
    )
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument(
        "--urgent",
        action="store_true",
        help="measure with real-time priority (Linux, with the right to it)",
    )
    made.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    made.add_argument("--markdown", metavar="FILE", help="write the tables as Markdown")
    if plots:
        made.add_argument("--plots", metavar="FOLDER", help=f"write as SVG: {plots}")
