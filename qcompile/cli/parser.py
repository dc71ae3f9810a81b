"""What the command line understands.

Comes in: nothing. Goes out: a parser with every command, its options and examples.
Always holds: building it imports none of the commands; every command has examples and ``--debug``.
"""

from __future__ import annotations

import argparse

from qcompile.cli.bench_parser import add_bench
from qcompile.cli.command import FILE as _FILE
from qcompile.cli.command import Commands, Lazy, Parser, Usual
from qcompile.cli.command import command as _command

_POLICIES = "for sites without a kernel: error, dequantize or requantize"
_CODES = """exit codes:
  0    done
  1    done, and the answer is no: doctor found something required missing
  2    an error, told on stderr
  130  interrupted

QCOMPILE_CACHE, QCOMPILE_CXX, QCOMPILE_LOG, QCOMPILE_DUMP and others are in
docs/verify.md and docs/backends.md.
Colours appear on terminals only; NO_COLOR=1 switches them off.
"""


def parser() -> Parser:
    """A fresh parser."""
    made = Parser(
        prog="qcompile",
        description="Compile and run quantized models.",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=_version())
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for add in (_demo, _generate, _export, _plan, _inspect, _eval, add_bench, _doctor, _completion):
        add(commands)
    return made


def _version() -> str:
    import qcompile

    return f"qcompile {qcompile.__version__}"


def _demo(commands: Commands) -> None:
    examples = """
        qcompile demo
        qcompile demo --prompt "The sea is" --tokens 20 --json
    """
    about = "run Gemma 3 270M (Q4_K_M) from the packages of the demo extra"
    command = _command(commands, "demo", about, examples, Lazy("demo", "run_demo"))
    command.add_argument("--prompt", default=None, help="text to continue")
    _generation(command)


def _generate(commands: Commands) -> None:
    examples = """
        qcompile generate model.gguf --prompt "The sea is"
        qcompile generate folder --prompt "The sea is" --dtype bfloat16 --tokens 200
        qcompile generate saved --prompt "The sea is"
        qcompile generate model.gguf --prompt "The sea is" --device npu:910b --emulate
        qcompile generate model.gguf --prompt "The sea is" --json > run.json
        qcompile generate model.gguf --chat --system "Answer briefly."
        qcompile generate model.gguf --chat --prompt "Why is the sea salty?"
    """
    about = "continue a prompt, or answer in a conversation"
    command = _command(commands, "generate", about, examples, Lazy("generate", "run_generate"))
    command.add_argument("file", help=f"{_FILE}, or what export made")
    command.add_argument("--prompt", help="text to continue; with --chat, one question")
    command.add_argument(
        "--chat",
        action="store_true",
        help="answer by the checkpoint's chat template: --prompt, or line by line what stdin says",
    )
    command.add_argument("--system", metavar="TEXT", help="what a conversation begins with")
    _generation(command)


def _export(commands: Commands) -> None:
    examples = """
        qcompile export model.gguf saved
        qcompile export model.gguf saved --dtype bfloat16 --numerics fast
        qcompile export folder saved --context 2048 --json
    """
    about = "compile ahead of time, and save what runs without compiling"
    command = _command(commands, "export", about, examples, Lazy("export", "run_export"))
    command.add_argument("file", help=_FILE)
    command.add_argument("out", help="the folder to make")
    command.add_argument("--device", default="cpu", metavar="TARGET", help="cpu alone so far")
    _compiling(command)
    command.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16")
    command.add_argument(
        "--context", type=int, default=4096, metavar="N", help="tokens of a text at most (4096)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    command.add_argument("--json", action="store_true", help="print what was made as JSON")


def _generation(command: Parser) -> None:
    _where(command)
    _running(command)
    command.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens to generate at most"
    )
    command.add_argument("--verify", action="store_true", help="check every site first")
    command.add_argument("--json", action="store_true", help="print text and times as JSON")


def _where(command: Parser) -> None:
    command.add_argument(
        "--device", default=Usual("cpu"), metavar="TARGET", help="cpu, cuda:sm90, npu:910b, ..."
    )
    _compiling(command)
    command.add_argument(
        "--emulate", action="store_true", help="run the device's operators on this CPU"
    )


def _compiling(command: Parser) -> None:
    command.add_argument(
        "--scheme", default=Usual("auto"), metavar="NAME", help="the checkpoint's scheme"
    )
    command.add_argument(
        "--on-unsupported", default=Usual("error"), metavar="POLICY", help=_POLICIES
    )
    command.add_argument(
        "--numerics",
        default=Usual("exact"),
        metavar="NAME",
        help="exact, or fast: int8 activations",
    )


def _running(command: Parser) -> None:
    command.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16")
    command.add_argument("--emitter", metavar="NAME", help="chain (the CPU's), inductor or eager")


def _plan(commands: Commands) -> None:
    examples = """
        qcompile plan model.gguf
        qcompile plan model.gguf --device npu:910b --on-unsupported requantize
        qcompile plan model.gguf --explain model.layers.0.mlp.down_proj
        qcompile plan model.gguf --verify --html plan.html
        qcompile plan folder --json | jq '.sites[] | select(.runs_as == "no kernel").site'
    """
    about = "which kernel would run each site, and why"
    command = _command(commands, "plan", about, examples, Lazy("plan", "run_plan"))
    command.add_argument("file", help=_FILE)
    _where(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--html", metavar="OUT", help="write the plan as one web page")
    command.add_argument("--explain", metavar="SITE", help="every kernel's verdict on one site")
    command.add_argument(
        "--verify",
        action="store_true",
        help="pack the weights and measure every site against the reference",
    )


def _inspect(commands: Commands) -> None:
    examples = """
        qcompile inspect model.gguf
        qcompile inspect folder --json | jq '.tensors[].name'
    """
    about = "what a checkpoint's headers say"
    command = _command(commands, "inspect", about, examples, Lazy("show", "run_inspect"))
    command.add_argument("file", help=_FILE)
    command.add_argument("--scheme", default="auto", metavar="NAME", help="the checkpoint's scheme")
    command.add_argument("--json", action="store_true", help="print JSON")


def _eval(commands: Commands) -> None:
    examples = """
        qcompile eval model.gguf --text held-out.txt
        qcompile eval q2.gguf q4.gguf q8.gguf --text held-out.txt --tokens 4096
        qcompile eval gptq-folder --text held-out.txt --against float --against float-folder
        qcompile eval model.gguf --text held-out.txt --against none --json
    """
    about = "perplexity on a text, and how far from the float model"
    command = _command(commands, "eval", about, examples, Lazy("evaluate", "run_eval"))
    command.add_argument("files", nargs="+", metavar="file", help=_FILE)
    command.add_argument("--text", required=True, metavar="FILE", help="text to read, UTF-8")
    command.add_argument(
        "--against",
        action="append",
        metavar="WHAT",
        help="float: the same checkpoint decoded to float32 (the default); a model's folder or "
        "file; or none; may be given several times",
    )
    command.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="tokens to read at most"
    )
    command.add_argument(
        "--window", type=int, default=512, metavar="N", help="tokens read with one context"
    )
    _where(command)
    _running(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def _doctor(commands: Commands) -> None:
    examples = """
        qcompile doctor
        qcompile doctor --json
    """
    about = "what this machine has, and what each missing thing costs"
    command = _command(commands, "doctor", about, examples, Lazy("doctor", "run_doctor"))
    command.add_argument("--json", action="store_true", help="print JSON")


def _completion(commands: Commands) -> None:
    examples = """
        qcompile completion bash > ~/.local/share/bash-completion/completions/qcompile
        qcompile completion zsh > ~/.zfunc/_qcompile
        qcompile completion fish > ~/.config/fish/completions/qcompile.fish
    """
    about = "a script that completes qcompile in a shell"
    command = _command(
        commands, "completion", about, examples, Lazy("completion", "run_completion")
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
