"""Environments of other libraries, served as they are: `gymnasium` and `verifiers`, neither needed to import this."""
