"""One line per command; each command's module is imported when it runs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Gated attention for PyTorch: add the gate to a transformer, train it, prove what it does.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gated-attn {version('gated-attn')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:  # fmt: skip
    pass


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a recipe that comes with the package.")],
    gates: Annotated[str, typer.Option(help="Gates to compare, comma-separated; the first is the baseline. Separate by ';' if a spec has commas.")] = "none,paper-headwise,paper",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; the recipe's own seed is the first.")] = 3,
    match: Annotated[str, typer.Option(help="ffn: narrow the feed-forward so that parameters match; none: leave them.")] = "ffn",
    lr_sweep: Annotated[str, typer.Option("--lr-sweep", help="Learning-rate multipliers for the largest rate that does not diverge, such as 1,2,4,8.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0 means one per core.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for records and report.html [default: runs/RECIPE].")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a recipe value, such as optimizer.lr=0.001.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Train with several gates, compare in pairs.

    The same model on the same data and seeds, with parameters matched; writes the records and report.html.
    """
    from gated_attn.cli.compare import run

    run(recipe, gates, seeds, match, lr_sweep, jobs, output, overrides or [], as_json=json)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a recipe that comes with the package.")],
    gate: Annotated[str, typer.Option(help="A gate spec or preset, or none.")] = "none",
    seed: Annotated[int | None, typer.Option(help="Seed of initialisation and data order [default: the recipe's].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for checkpoints and the record [default: runs/RECIPE-GATE-seedSEED].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override a recipe value, such as optimizer.lr=0.001.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Train one model from a recipe.

    The gate's parameters come on top; `compare` narrows the feed-forward to match them.
    """
    from gated_attn.cli.train import run

    run(recipe, gate, seed, output, overrides or [], resume=resume, as_json=json)


def _layouts(wanted: bool) -> None:
    if wanted:
        from gated_attn.cli.convert import layouts

        for name, line in layouts().items():
            print(f"{name:12} {line}")
        raise typer.Exit


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; it must not exist.")],
    to_layout: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="separate, g_proj, gate_proj, w_g, per_head, per_kv_group, flat, group_qgkv or tail_rows.")],
    from_layout: Annotated[str | None, typer.Option("--from", metavar="LAYOUT", help="The layout of SRC [default: what its config.json records, or what transformers reads for its model_type].")] = None,
    width: Annotated[str | None, typer.Option(help="headwise or elementwise [default: what config.json records, or what gates of its model_type are].")] = None,
    modules: Annotated[str, typer.Option(metavar="REGEX", help="Convert only attention modules whose path matches; copy the others.")] = "",
    layouts: Annotated[bool, typer.Option("--layouts", callback=_layouts, is_eager=True, help="Say what each layout is, and exit.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Rewrite a checkpoint in another gate layout.

    Bit for bit and shard by shard; DST appears only if no tensor is missing, unexpected or written twice.
    """
    from gated_attn.cli.convert import run

    run(source, target, from_layout, to_layout, width, modules, as_json=json)


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `train` wrote, one of its checkpoints, or a transformers model with attached gates.")],
    output: Annotated[Path, typer.Argument(help="A new folder, for transformers' from_pretrained.")],
    target: Annotated[str, typer.Option(help="qwen3, llama, lfm3, qwen3_5_text or laguna; auto takes the first that fits.")] = "auto",
    json: Json = False,
) -> None:  # fmt: skip
    """Turn a run, or attached gates, into a stock model.

    Stock transformers loads it, without gated-attn; it is reloaded and compared before the folder appears.
    """
    from gated_attn.cli.export import run

    run(run_folder, output, target, as_json=json)


@app.command()
def attach(
    model: Annotated[Path, typer.Argument(help="A folder, a sample such as smollm2 or minilm, or a name on the hub.")],
    spec: Annotated[str, typer.Argument(help="A gate spec or preset, such as identity.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the gated model.")],
    cross: Annotated[str | None, typer.Option(help="Another gate, or none, for cross attention.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers that get a gate, such as 0-3,7 [default: the spec's].")] = None,
    names: Annotated[list[str] | None, typer.Option("--name", help="Only attention modules whose name matches, such as 'model.decoder.*'.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Put gates into a saved transformers model.

    The gates are verified before the whole model is written; tokenizer files come along.
    """
    from gated_attn.cli.attach import run

    run(model, spec, output, cross, layers, names or [], as_json=json)


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="Folder of a gated transformers model.")],
    json: Json = False,
) -> None:
    """Prove that a model's gates are wired.

    All gates are shut together; each block must then give exactly what a shut gate leaves. Exit code 1 if one does not.
    """
    from gated_attn.cli.verify import run

    run(model, as_json=json)


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="A folder, a sample such as smollm2, minilm or whisper, or a name on the hub.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to read [default: the help texts of Python].")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to read.")] = 4096,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens of each sequence [default: 512, or the model's positions].")] = None,
    layers: Annotated[str | None, typer.Option(help="Only these layers, such as 0-3,7.")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these heads of each layer.")] = None,
    queries: Annotated[str | None, typer.Option(help="Only queries at these positions, such as 64-512.")] = None,
    sink_tokens: Annotated[int, typer.Option("--sink-tokens", min=1, help="T of the sink rate: it falls with T.")] = 64,
    special: Annotated[bool, typer.Option("--special/--no-special", help="Whether sequences have the tokenizer's special tokens.")] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: as saved.")] = "auto",
    attention: Annotated[str | None, typer.Option("--attn", help="eager, sdpa, ... [default: the model's].")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for diagnosis.json and report.html.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Show a model's attention sinks, outliers and gates.

    Streaming: memory grows with the length, never with its square, and the model's outputs stay as they are.
    """
    from gated_attn.cli.diagnose import run

    run(
        model,
        text,
        tokens,
        length,
        layers,
        heads,
        queries,
        sink_tokens,
        special,
        dtype,
        attention,
        output,
        as_json=json,
    )


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="A diagnosis.json, transfer.json, health.json, run.json or compare.json, or a folder with one.")],
    before: Annotated[Path | None, typer.Option(help="An earlier diagnosis of the same text, to stand beside.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write [default: report.html beside the record].")] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Whether to draw PNGs beside it, of a diagnosis or gates over steps.")] = True,
) -> None:  # fmt: skip
    """Draw a record as one HTML page.

    A diagnosis, gates over the steps of a run, a run or a comparison; no network, readable without JavaScript.
    """
    from gated_attn.cli.report import run

    run(path, before, output, pictures=pictures)


@app.command()
def transfer(
    model: Annotated[str, typer.Argument(help="A folder, a sample such as smollm2, or a name on the hub; a causal model without gates.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for gates, transfer.json and report.html; one that was interrupted goes on.")],
    tier: Annotated[str, typer.Option(help="exact: gates read the scores, the same function; hidden: they read hidden states, fitted and distilled.")] = "exact",
    sink: Annotated[str, typer.Option(help="The sink token, by number or text; auto: BOS, else end of text, else a line break.")] = "auto",
    text: Annotated[list[Path] | None, typer.Option(help="A UTF-8 text, a kind by its name; again for more [default: technical, literature, chat].")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens that shares are fitted on.")] = 48_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each row.")] = 256,
    distil: Annotated[int, typer.Option(min=0, help="Steps of distillation, hidden tier.")] = 120,
    lr: Annotated[float, typer.Option(help="Learning rate of the gates.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of the order of rows.")] = 0,
    measure: Annotated[str, typer.Option(help="What is measured before and after, comma-separated.")] = "perplexity,attention,quantisation,streaming",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: as saved.")] = "auto",
    json: Json = False,
) -> None:  # fmt: skip
    """Turn a pretrained model's attention sinks into gates.

    The sink token leaves the input; perplexity, sinks, outliers, rounding and streams are measured before and after.
    """
    from gated_attn.cli.transfer import run

    run(model, output, tier, sink, text or [], tokens, length, distil, lr, seed, measure, dtype, as_json=json)


@app.command()
def explore(
    model: Annotated[str, typer.Argument(help="A folder, a sample such as smollm2 or minilm, or a name on the hub.")],
    text: Annotated[str | None, typer.Option(help="The text to begin with.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback, others can reach the page.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the first free one from 7860 on.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: as saved.")] = "auto",
    browser: Annotated[bool, typer.Option("--browser", help="Open the page in a browser, too.")] = False,
) -> None:  # fmt: skip
    """See every head at work on a text, in a local page.

    Token by token: each head's gate, what it attends to, what it adds; close or open heads and see the prediction change.
    """
    from gated_attn.cli.explore import run

    run(model, text, host, port, dtype, browser=browser)


@app.command()
def specs(json: Json = False) -> None:
    """List presets and the words of a spec.

    Each preset comes with the name that other projects give it.
    """
    from gated_attn.cli.specs import run

    run(as_json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this machine can do.

    Versions, devices, threads, attention implementations with reasons, and the real texts and models fetched so far.
    """
    from gated_attn.cli.doctor import run

    run(as_json=json)
