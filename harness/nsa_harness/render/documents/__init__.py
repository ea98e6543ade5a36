"""The files that nsa-harness writes about a run: JSON, Markdown, HTML, JUnit, SARIF and a trace."""
