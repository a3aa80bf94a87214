"""GET /metrics, in Prometheus' text form."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..state import serving_of


async def metrics(request: Request) -> Response:
    from ..exposition import CONTENT_TYPE_LATEST, render

    serving = serving_of(request)
    text = render(serving.metrics, serving.engine, serving.names[0])
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
