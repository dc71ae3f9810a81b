"""What the command line understands.

Comes in: nothing. Goes out: a parser with every command, its options and examples.
Always holds: building it imports none of the commands; every command has examples and ``--debug``.
"""

from __future__ import annotations

import argparse
import importlib
from typing import NoReturn, TypeAlias

from qcompile.errors import OptionError

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

_POLICIES = "for sites without a kernel: error, dequantize or requantize"
_FILE = "a GGUF file or a checkpoint folder"
_CODES = """exit codes:
  0    done
  1    done, and the answer is no: doctor found that something required is missing
  2    an error, told on stderr
  130  interrupted

QCOMPILE_CACHE, QCOMPILE_CXX, QCOMPILE_LOG, QCOMPILE_DUMP and others: see the README.
Colours appear on terminals only; NO_COLOR=1 switches them off.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the family's own."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise OptionError(
            "the command line", message, f"what {self.prog} --help lists", "correct the arguments"
        )


class Lazy:
    """A command that is imported when it runs, so that ``--help`` is quick."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run the command; its exit code."""
        module = importlib.import_module(f"qcompile.cli.{self.module}")
        return int(getattr(module, self.function)(arguments))


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
    for add in (_demo, _generate, _plan, _inspect, _eval, _bench, _doctor, _completion):
        add(commands)
    return made


def _version() -> str:
    import qcompile

    return f"qcompile {qcompile.__version__}"


def _command(commands: Commands, name: str, about: str, examples: str, run: Lazy) -> Parser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=run)
    return command


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
        qcompile generate model.gguf --prompt "The sea is" --device npu:910b --emulate
        qcompile generate model.gguf --prompt "The sea is" --json > run.json
    """
    about = "continue a prompt"
    command = _command(commands, "generate", about, examples, Lazy("generate", "run_generate"))
    command.add_argument("file", help=_FILE)
    command.add_argument("--prompt", required=True, help="text to continue")
    _generation(command)


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
        "--device", default="cpu", metavar="TARGET", help="cpu, cuda:sm90, npu:910b, ..."
    )
    command.add_argument("--scheme", default="auto", metavar="NAME", help="the checkpoint's scheme")
    command.add_argument("--on-unsupported", default="error", metavar="POLICY", help=_POLICIES)
    command.add_argument(
        "--numerics", default="exact", metavar="NAME", help="exact, or fast: int8 activations"
    )
    command.add_argument(
        "--emulate", action="store_true", help="run the device's operators on this CPU"
    )


def _running(command: Parser) -> None:
    command.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16")
    command.add_argument("--emitter", metavar="NAME", help="inductor or eager")


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


def _bench(commands: Commands) -> None:
    examples = """
        qcompile bench model model.gguf --quick
        qcompile bench kernels --aot
    """
    about = "figures of kernels, or of a model beside peers"
    command = _command(commands, "bench", about, examples, Lazy("bench", "run_kernels"))
    parts = command.add_subparsers(required=True, metavar="WHAT")
    _bench_kernels(parts)
    _bench_model(parts)


def _bench_kernels(commands: Commands) -> None:
    examples = """
        qcompile bench kernels --aot
        qcompile bench kernels --aot --arch sm90 --only "w4 g128"
        qcompile bench kernels --aot --arch sm80 --arch sm90 --json figures.json
    """
    about = "what kernels for a GPU need of it, compiled without one"
    command = _command(commands, "kernels", about, examples, Lazy("bench", "run_kernels"))
    command.add_argument("--aot", action="store_true", help="compile ahead of time")
    command.add_argument("--arch", action="append", metavar="ARCH", help="sm80, sm90, ...")
    command.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    command.add_argument("--json", metavar="FILE", help="write the figures as JSON")


def _bench_model(commands: Commands) -> None:
    examples = """
        qcompile bench model model.gguf
        qcompile bench model model.gguf --quick --against none
        qcompile bench model model.gguf --against llama.cpp --numerics fast --markdown table.md
        qcompile bench model folder --against transformers --batch 1,4 --json run.json --plots .
    """
    about = "speed, memory and outputs of a model beside peers, in turns"
    command = _command(commands, "model", about, examples, Lazy("bench", "run_model"))
    command.add_argument("file", help=_FILE)
    command.add_argument(
        "--device", default="cpu", metavar="TARGET", help="cpu, cuda, ...; peers run on a CPU only"
    )
    command.add_argument(
        "--against",
        metavar="PEERS",
        help="llama.cpp,transformers (the default), some of them, or none;"
        " QCOMPILE_LLAMA_CPP_PYTHON names the interpreter that has llama-cpp-python",
    )
    for name, about in (
        ("--prompt-tokens", "tokens of a prompt (512)"),
        ("--tokens", "tokens that follow (64)"),
        ("--rounds", "rounds of turns (5)"),
        ("--threads", "threads of each contender (all cores)"),
        ("--compared", "tokens of text on which outputs are compared (128), or 0"),
    ):
        command.add_argument(name, type=int, metavar="N", help=about)
    command.add_argument("--batch", default="1", metavar="N,N", help="sequences at once (1)")
    command.add_argument("--dtype", default="float32", metavar="DTYPE", help="of our activations")
    command.add_argument(
        "--numerics", default="exact", metavar="NAME", help="exact, or fast: int8 activations"
    )
    command.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds, llama.cpp alone"
    )
    command.add_argument(
        "--urgent",
        action="store_true",
        help="measure with real-time priority (Linux, with the right to it)",
    )
    command.add_argument("--json", metavar="FILE", help="write everything measured as JSON")
    command.add_argument("--markdown", metavar="FILE", help="write the tables as Markdown")
    command.add_argument("--plots", metavar="FOLDER", help="write throughput by batch as SVG")


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
