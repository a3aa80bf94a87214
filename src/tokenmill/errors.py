"""Every exception tokenmill raises on purpose. Each knows its HTTP status and its public code.

TokenmillError                        500 internal_error
├── InvalidRequest  (ValueError)      400 invalid_value           the request is wrong; `param` names the field
│   ├── ContextLengthExceeded         400 context_length_exceeded
│   ├── RequestTooLarge               413 request_too_large
│   └── UnsupportedField              400 unsupported_field
├── AuthenticationFailed              401 invalid_api_key
├── NotFound        (LookupError)     404 not_found
│   └── ModelNotFound                 404 model_not_found
├── Overloaded                        429 queue_full              carries `retry_after` seconds
├── EngineUnavailable                 503 engine_unavailable      the engine died or is draining
└── SetupError                        raised before serving starts; the CLI prints one line and exits 1
    ├── ConfigError     (ValueError)  a setting is not understood or cannot be met
    ├── SourceError                   a model reference cannot be found, fetched or trusted
    └── ModelFileError  (ValueError)  a model's file is cut, damaged or hostile
        └── UnsupportedModel          the file is sound but asks for something tokenmill does not have
"""

from __future__ import annotations


class TokenmillError(Exception):
    """Base class. `message` is safe to show to a client: never a path inside the server, never a stack."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TokenmillError, ValueError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class AuthenticationFailed(TokenmillError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(TokenmillError, LookupError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Overloaded(TokenmillError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1, param: str | None = None):
        super().__init__(message, param=param)
        self.retry_after = retry_after


class EngineUnavailable(TokenmillError):
    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class SetupError(TokenmillError):
    code = "setup_error"


class ConfigError(SetupError, ValueError):
    code = "config_error"


class SourceError(SetupError):
    code = "source_error"


class ModelFileError(SetupError, ValueError):
    code = "model_file_error"


class UnsupportedModel(ModelFileError):
    code = "unsupported_model"
