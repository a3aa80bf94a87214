"""GET /v1/models and /v1/models/{id}: the one model this server has, under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ..errors import JSON
from ..state import Serving, serving_of


def _model(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "tokenmill",
        "root": serving.names[0],
        "max_model_len": info.max_model_len if info else None,
    }


async def list_models(request: Request) -> JSON:
    serving = serving_of(request)
    return JSON({"object": "list", "data": [_model(serving, name) for name in serving.names]})


async def get_model(request: Request) -> JSON:
    serving = serving_of(request)
    return JSON(_model(serving, serving.check_model(request.path_params["name"])))
