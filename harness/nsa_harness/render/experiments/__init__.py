"""Text, pictures and JSON for bisections, claims, verifications and readiness checks."""
