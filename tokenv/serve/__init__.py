"""A page that cuts a text as one types it: starlette and uvicorn carry it, the extra ``serve``."""
