"""The target model: materialise it and write its content identity."""
