"""`tide-env check`: whether an environment server, in whatever language, speaks the contract.

    command -> Subject (a URL, or a process of its own) -> each Case with a Talk of its own -> Results -> report

A case is a sentence of `docs/contract.md` and a function that tries it out; it speaks to the server as a gateway does.
"""
