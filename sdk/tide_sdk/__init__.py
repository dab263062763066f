"""Wire contract, clients, environment server and the `@agent` decorator of TideRL."""
