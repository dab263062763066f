"""The environment gateway: hosts environments and serves tasks over the wire contract.

Layers, each importing only those to its right:
`cli > app > endpoints > service > repository | runtimes > models > database`.
"""
