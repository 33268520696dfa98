"""``eata serve``: an endpoint whose model adapts to what it is sent."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eata.errors import EataError

if TYPE_CHECKING:
    from torch import nn

    from eata.adapter import Adapter

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
    body: Annotated[float, typer.Option(help="Most megabytes in one request; more get 413.")] = 16.0,
) -> None:
    """Serve a model that adapts to what it is sent.

    It speaks the Open Inference Protocol v2, takes image files at /predict, shows itself at /, and lists everything at
    /docs. Example: eata serve resnet26-bn-cifar10 --fisher clean-photos --state state --token SECRET
    """
    import eata.models
    import eata.serve

    if "/" in (name := name or _name(model)):
        raise EataError(f"--name {name!r} can't have a slash: it is a part of an address.")
    net = eata.models.load(model, weights=weights)
    source = copy.deepcopy(net)
    app = eata.serve.app(
        _adapter(net, method, preset, lr, fisher, window, guard),
        name=name,
        source=source,
        state=state,
        token=token or None,
        batch=batch,
        wait=wait,
        queue=queue,
        timeout=timeout,
        share=share,
        save_every=save_every,
        body=body,
    )
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

    logging.basicConfig(level=logging.INFO, format="%(levelname)s:     %(message)s")
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


def _adapter(
    net: nn.Module, method: str, preset: str, lr: float | None, fisher: Path | None, window: int, guard: bool
) -> Adapter:
    """The method around the net, in a window where batches matter, and guarded if asked for."""
    import eata

    kind = eata.method(method)
    takes = inspect.signature(kind).parameters
    config: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    name = preset or ("imagenet" if int(config["num_classes"]) >= 100 else "cifar10")
    arguments: dict[str, Any] = dict(eata.preset(name, kind))
    if lr is not None and "lr" in takes:
        arguments["lr"] = lr
    if "fisher" in takes:
        arguments["fisher"] = _fisher(net, fisher, config, arguments["per"])
    model: Adapter = kind(net, **arguments)
    if window:
        model = eata.Window(model, length=window)
    if guard:
        if not hasattr(eata, "Guard"):
            raise EataError("--guard needs a newer eata, which has eata.Guard; leave it out for now.")
        model = eata.Guard(model)
    return model


def _fisher(net: nn.Module, folder: Path | None, config: dict[str, Any], per: Any) -> Any:
    import eata
    from eata.importance import BATCH

    if folder is None:
        raise EataError(
            "EATA needs clean images, to know which weights to hold: pass a few hundred with --fisher FOLDER, or take "
            "--method eta, which needs none."
        )
    stream = eata.data.load(f"folder:{folder}", size=int(config["input_size"][-1]))
    return eata.fisher(net, stream.batches(BATCH, mean=config["mean"], std=config["std"]), per=per)
