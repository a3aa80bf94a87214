"""The ASGI application: the route table and what surrounds it. Start at server/routes; run by server/run.py."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from .errors import HANDLERS
from .middleware import KeyGuard, RequestId
from .routes.chat import chat_completions
from .routes.completions import completions
from .routes.health import health, root, version
from .routes.metrics import metrics
from .routes.models import get_model, list_models
from .routes.tokenize import detokenize, tokenize
from .state import Serving

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/", root, methods=["GET"]),
]


def make_app(serving: Serving) -> Starlette:
    middleware = [Middleware(RequestId)]
    if serving.config.api_key:
        middleware.append(Middleware(KeyGuard, keys=serving.config.api_key))
    app = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=HANDLERS)  # type: ignore[arg-type]
    app.router.redirect_slashes = False  # /v1/models/ is not a route
    app.state.serving = serving
    return app
