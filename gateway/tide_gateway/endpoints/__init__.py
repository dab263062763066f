"""HTTP: the contract's endpoints as a lean ASGI app, the views as a FastAPI app."""
