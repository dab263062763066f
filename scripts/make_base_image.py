"""Makes a small Python base image from this machine's own Debian files, for machines that reach no image registry.

Usage: python scripts/make_base_image.py [--tag tide-base:debian] [--if-missing]
       python scripts/make_base_image.py --output base.tar

The image holds Debian's python3, a shell, coreutils, the libraries that wheels link to, and pip. The engine is the one
that DOCKER_HOST names, as for the `docker` command. It takes a few seconds and needs Debian or a relative of it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath

TAG = "tide-base:debian"
COMMAND_TIMEOUT_S = 120
# What Dockerfiles and wheels count on besides Python itself.
ROOTS = ("base-files", "dash", "coreutils", "libc6", "libgcc-s1", "libstdc++6", "zlib1g")
# Needed only to install or configure packages, which nobody does in this image.
LEFT_OUT = {"debconf", "dpkg", "perl-base", "gcc-12-base", "awk", "mawk", "debianutils"}
LEFT_OUT_FILES = re.compile(
    r"^/usr/share/(doc|man|info|locale|lintian|bug|menu|applications|pixmaps)/|/gconv/|/EXTERNALLY-MANAGED$"
)
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib32": "usr/lib32", "lib64": "usr/lib64"}
FOLDERS = {"tmp": 0o1777, "var/tmp": 0o1777, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "root": 0o700}
TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
CHANGES = (
    "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
    "ENV LANG=C.UTF-8",
    'CMD ["python3"]',
)


def python_name() -> str:
    """The package of Debian's own Python, for example `python3.11`. Exits where there is none."""
    found = Path("/usr/bin/python3").resolve()
    if found.parent != Path("/usr/bin") or not re.fullmatch(r"python3\.\d+", found.name):
        sys.exit("make_base_image: this machine has no Debian python3. Run: apt-get install python3")
    return found.name


def closure(roots: Sequence[str]) -> list[str]:
    """The installed packages that the roots need, they themselves included.

    Raises:
        SystemExit: a root is not installed.
    """
    status = _lines(
        "dpkg-query", "-W", "-f", "${binary:Package}\t${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    )
    owner: dict[str, str] = {}
    needs: dict[str, str] = {}
    for line in status:
        binary, name, provides, depends = line.split("\t")
        owner.setdefault(name, binary)
        needs[binary] = depends
        for provided in re.findall(r"[a-z0-9][a-z0-9.+-]+(?=\s*[,(]|\s*$)", provides):
            owner.setdefault(provided, binary)
    if missing := [name for name in roots if name not in owner]:
        sys.exit(f"make_base_image: not installed: {' '.join(missing)}. Run: apt-get install {' '.join(missing)}")
    pending, found = [owner[name] for name in roots], dict[str, None]()
    while pending:
        package = pending.pop()
        if package in found or package.split(":")[0] in LEFT_OUT:
            continue
        found[package] = None
        for alternatives in needs[package].split(","):
            names = [re.split(r"[\s(:]", choice.strip())[0] for choice in alternatives.split("|")]
            pending += [owner[name] for name in names if name in owner][:1]
    return list(found)


def package_files(packages: Sequence[str]) -> Iterator[Path]:
    """The files and links of the packages, each below the folder where it truly lies (/lib is a link to /usr/lib)."""
    seen: set[Path] = set()
    for name in _lines("dpkg-query", "-L", *packages):
        if not name.startswith("/") or LEFT_OUT_FILES.search(name):
            continue
        path = Path(os.path.realpath(os.path.dirname(name))) / os.path.basename(name)
        if path not in seen and (path.is_symlink() or path.is_file()):
            seen.add(path)
            yield path


def write_archive(target: Path) -> None:
    """Write the image's files as a tar archive; an older one is replaced.

    Args:
        target: the file.

    Raises:
        SystemExit: this machine lacks what it takes; the message says what to install.
    """
    python = python_name()
    packages = closure((*ROOTS, python))
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive, tempfile.TemporaryDirectory() as temporary:
        for name, mode in FOLDERS.items():
            _add_bytes(archive, name, b"", mode, tarfile.DIRTYPE)
        for name, link in LINKS.items():
            if Path("/", name).is_symlink():
                _add_bytes(archive, name, b"", 0o777, tarfile.SYMTYPE, link)
        for name, text in TEXTS.items():
            _add_bytes(archive, name, text.encode(), 0o644)
        for path in package_files(packages):
            if path.as_posix()[1:] not in (*TEXTS, *LINKS):
                archive.add(path, arcname=path.as_posix()[1:], recursive=False, filter=_plain)
        for name in ("python3", "python"):
            _add_bytes(archive, f"usr/bin/{name}", b"", 0o777, tarfile.SYMTYPE, python)
        if CERTIFICATES.is_file():
            _add_bytes(archive, CERTIFICATES.as_posix()[1:], CERTIFICATES.read_bytes(), 0o644)
        pip_folder = PurePosixPath("usr/local/lib", python, "dist-packages")
        for file in metadata.files("pip") or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.suffix != ".pyc" and source.is_file():
                archive.add(source, arcname=str(pip_folder / file), recursive=False, filter=_plain)
        # Compiled ahead: a container's root is read-only, and it would compile everything anew at each start.
        for source, name in _compiled(python, Path(temporary)):
            archive.add(source, arcname=name, recursive=False, filter=_plain)


def import_image(archive: Path, tag: str) -> None:
    """Give the archive to the engine as an image.

    Raises:
        SystemExit: the engine refused it or is not there.
    """
    changes = [word for change in CHANGES for word in ("--change", change)]
    command = ["docker", "import", *changes, str(archive), tag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"make_base_image: docker import failed: {done.stderr.strip()}")


def has_image(tag: str) -> bool:
    """Whether the engine has an image of that name."""
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", tag]
    return subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S).returncode == 0


def _compiled(python: str, folder: Path) -> Iterator[tuple[Path, str]]:
    library = Path("/usr/lib", python)
    for path in _library_sources(python, library):
        copy = folder / path.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    # By Debian's Python and not by ours: the format belongs to the version that reads it.
    command = [f"/usr/bin/{python}", "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    command += ["-s", str(folder), "-p", "/", str(folder)]
    subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S, stdout=subprocess.DEVNULL)
    for path in sorted(folder.rglob("*.pyc")):
        yield path, path.relative_to(folder).as_posix()


def _library_sources(python: str, library: Path) -> Iterator[Path]:
    names = [f"lib{python}-minimal", f"lib{python}-stdlib"]
    for path in package_files(names):
        if path.suffix == ".py" and not path.is_symlink() and path.is_relative_to(library):
            yield path


def _add_bytes(
    archive: tarfile.TarFile, name: str, content: bytes, mode: int, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname = kind, mode, len(content), link
    archive.addfile(member, io.BytesIO(content))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode &= ~(stat.S_ISUID | stat.S_ISGID)
    return member


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"make_base_image: needs Debian's packages: {error}")
    return done.stdout.splitlines()


def main() -> None:
    """Reads the command line and makes the archive or the image."""
    parser = argparse.ArgumentParser(description="Make a Python base image from this machine's Debian files.")
    parser.add_argument("--tag", default=TAG, help=f"name of the image (default: {TAG})")
    parser.add_argument("--if-missing", action="store_true", help="do nothing where the engine has the image")
    parser.add_argument("--output", type=Path, help="write the archive for docker import here and make no image")
    arguments = parser.parse_args()
    if arguments.output is not None:
        write_archive(arguments.output)
        return
    if arguments.if_missing and has_image(arguments.tag):
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "base.tar"
        write_archive(archive)
        import_image(archive, arguments.tag)
    print(f"made the image {arguments.tag}")


if __name__ == "__main__":
    main()
