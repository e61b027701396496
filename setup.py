"""The README and links of a distribution, with the repository's address if it is known."""

import os
import re
from pathlib import Path

from setuptools import setup

readme = Path("README.md").read_text(encoding="utf-8")
urls = {"Paper": "https://arxiv.org/abs/2605.26895"}
if repository := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
    urls |= {"Repository": repository, "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md"}
    # Package indexes show the README without the repository's files; pictures have an address of
    # their own.
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository}/raw/HEAD/", readme)
    readme = re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/HEAD/", readme)

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
