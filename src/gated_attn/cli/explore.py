"""`gated-attn explore`: a local page on which one sees every head at work on a text, and opens or closes its gate."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from gated_attn.errors import MissingExtraError, RecipeError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(model: str, text: str | None, host: str, port: int, dtype: str, *, browser: bool) -> None:
    """Serve the page until it is interrupted."""
    quiet(host)
    try:
        import_module("gradio")
    except ImportError:
        raise MissingExtraError("gradio", "explore", "gated-attn explore") from None
    from gated_attn.cli.explorer.page import CSS, build, theme
    from gated_attn.cli.explorer.state import Explorer
    from gated_attn.cli.models import load

    explorer = Explorer(*load(model, dtype=dtype))
    page = build(explorer, text or explorer.example())
    if host not in LOOPBACK:
        print(f"gated-attn: everyone who reaches {host} can use this page", file=sys.stderr)
    serve(page, host, port, css_paths=[CSS], theme=theme(), inbrowser=browser)


def quiet(host: str) -> None:
    """Let Gradio ask nobody anything, and reach its own server past a proxy."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), *LOOPBACK, host]))


def serve(page: Any, host: str, port: int, **options: Any) -> None:
    """Until it is interrupted; RecipeError if the port is taken."""
    try:
        _, address, _ = page.launch(
            server_name=host, server_port=port or None, share=False, footer_links=[], ssr_mode=False, mcp_server=False,
            pwa=False, enable_monitoring=False, prevent_thread_lock=True, quiet=True, **options,
        )  # fmt: skip
    except OSError as error:
        raise RecipeError(f"--host {host} --port {port}: {error}; name another port, or --port 0 for any") from error
    print(f"the page: {address} (Ctrl-C ends it)", flush=True)
    page.block_thread()
