"""The controller process's actors: resource manager, controller, gang schedulers and their policies."""
