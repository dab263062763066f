"""The trainer's own policies against modelled engines on a virtual clock: pure code, no asyncio, no real time."""
