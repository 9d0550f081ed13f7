"""Twenty prompts of many kinds and lengths."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics are",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de l'Italie est",
    "Q: What is photosynthesis?\nA:",
    "To make a good cup of tea, first",
    "In 1969, the first humans",
    '{"name": "Ada", "born": 1815, "field":',
    "The quick brown fox",
    "Roses are red,",
    "日本の首都は",
    "The derivative of x^2 is",
    "Breaking news: scientists have discovered",
    "# Installation\n\nRun the following command:\n\n```bash\n",
    "The history of the printing press begins with Johannes Gutenberg, who in the fifteenth "
    "century brought together movable metal type, oil-based ink and a press adapted from the "
    "making of wine, and so made books cheap enough for people who had never owned one. Before",
)
