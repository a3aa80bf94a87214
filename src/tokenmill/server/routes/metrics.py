"""GET /metrics, in Prometheus' text form."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ..state import serving_of


async def metrics(request: Request) -> Response:
    return Response(serving_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})
