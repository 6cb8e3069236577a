"""From the jaxpr of a program to `pw.core.programs.Program`: *passes*, *placing*, *writing*."""
