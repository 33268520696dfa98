"""``eata serve``: an endpoint whose model adapts to what it is sent."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from eata.errors import EataError

GRACE = 5  # seconds beyond --timeout that open requests get when the server is told to stop


def serve(
    model: Annotated[
        str, typer.Argument(help="Ours, timm/NAME, torchvision/NAME, or package.module:factory for your own.")
    ],
    method: Annotated[str, typer.Option(help="source, bn, tent, eta or eata.")] = "eata",
    weights: Annotated[Path | None, typer.Option(help="Weights for the model: .safetensors, .pth or .pt.")] = None,
    fisher: Annotated[
        Path | None, typer.Option(help="For eata: a folder of a few hundred clean images like the training data.")
    ] = None,
    preset: Annotated[str, typer.Option(help="imagenet, cifar10 or digits; default: by the number of classes.")] = "",
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: the preset's.")] = None,
    window: Annotated[
        int, typer.Option(min=0, help="Samples whose statistics stand in for a batch (eata.Window); 0: none.")
    ] = 64,
    guard: Annotated[bool, typer.Option("--guard", help="Watch for collapse and roll back (eata.Guard).")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps; auto: the accelerator if any.")] = "auto",
    name: Annotated[str, typer.Option(help="Name of the model in addresses; default: the model's own.")] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for versions; default: in memory only.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Batches between two saves.")] = 20,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8000,
    proxy: Annotated[str, typer.Option(help="Address of a proxy whose X-Forwarded-For is to be believed.")] = "",
    token: Annotated[
        str, typer.Option(envvar="EATA_TOKEN", help="Everything but health needs it; the admin endpoints always.")
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Most samples a batch, and a request.")] = 64,
    wait: Annotated[float, typer.Option(min=0, help="Milliseconds that a batch waits to fill.")] = 10.0,
    queue: Annotated[int, typer.Option(min=1, help="Most samples that wait; more get 429.")] = 512,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may wait; then it gets 504.")] = 30.0,
    share: Annotated[float, typer.Option(help="Most of a step that one client may have; 1: no limit.")] = 1.0,
    replicas: Annotated[
        int,
        typer.Option(min=0, help="Processes that predict, beside one that adapts (eata[ray]); 0: one in all."),
    ] = 0,
    body: Annotated[float, typer.Option(help="Most megabytes in one request; more get 413.")] = 16.0,
) -> None:
    """Serve a model that adapts to what it is sent.

    It speaks the Open Inference Protocol v2, takes image files at /predict, shows itself at /, and lists everything at
    /docs. Example: eata serve resnet26-bn-cifar10 --fisher clean-photos --state state --token SECRET
    """
    import eata.serve
    from eata.serve.recipe import Recipe

    if "/" in (name := name or _name(model)):
        raise EataError(f"--name {name!r} can't have a slash: it is a part of an address.")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s:     %(message)s")
    recipe = Recipe(model, weights, method, preset, lr, fisher, window, guard, device)
    options: dict[str, Any] = {"name": name, "state": state, "batch": batch, "wait": wait, "queue": queue}
    options |= {"timeout": timeout, "share": share, "save_every": save_every}
    if replicas:
        from eata.serve import replicas as ray_serve

        ray_serve.run(recipe, replicas, options, token or None, body, host, port)
        return
    net = recipe.net()
    source = None if method == "source" else copy.deepcopy(net)  # the source need not be compared with itself
    app = eata.serve.app(recipe.adapter(net), source=source, token=token or None, body=body, **options)
    _listen(app, host, port, proxy, timeout)


def _name(model: str) -> str:
    """The model's own name, fit for an address: without its maker and its file's folder.

    >>> _name("timm/resnet50"), _name("nets/mine.safetensors"), _name("own:net")
    ('resnet50', 'mine', 'net')
    """
    return model.rpartition("/")[2].rpartition(":")[2].removesuffix(".safetensors")


def _listen(app: Any, host: str, port: int, proxy: str, timeout: float) -> None:
    """Answer until SIGTERM or Ctrl-C; then what was taken in is answered and saved."""
    import uvicorn

    app.state.engine.start()  # here, because what is wrong with a state folder is the caller's to mend
    uvicorn.run(
        app,
        host=host,
        port=port,
        proxy_headers=bool(proxy),
        forwarded_allow_ips=proxy or None,
        timeout_graceful_shutdown=round(timeout) + GRACE,
        access_log=False,
        server_header=False,
    )
