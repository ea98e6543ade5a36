"""The documents of a run: JSON, Markdown, HTML, JUnit, SARIF and a trace."""
