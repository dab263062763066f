"""`tide-gateway doctor`: whether a gateway could run here, and how the one that runs stands. It changes nothing.

options -> configuration -> checks, all at once, each with its own deadline -> findings -> table or JSON
"""
