"""The `gated-attn` command. Nothing here imports torch before a command that needs it runs."""

from __future__ import annotations

import sys

from gated_attn.errors import GatedAttnError, MissingExtraError


def main() -> None:
    """Run the command line; an error of this package is one message on stderr and exit code 1, not a traceback."""
    try:
        try:
            from gated_attn.cli.app import app
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("typer", "rich"):
                raise
            raise MissingExtraError(str(error.name), "lab", "the gated-attn command") from None
        app()
    except GatedAttnError as error:
        print(f"gated-attn: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:  # an output folder that cannot be written, a disk that is full
        print(f"gated-attn: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 130:  # what typer makes of Ctrl-C
            raise
        print(
            "gated-attn: stopped; a run goes on from its last checkpoint, written every training.eval_every steps",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
