"""
Compiles the training step for an H100 on a machine without a GPU. Run by hand, on Linux with gcc and a CUDA 13 build
of torch (a wheel from PyPI, 5 GB with what it needs), about a minute of one core for each case:

    python tests/compile_for_cuda.py                # all cases
    python tests/compile_for_cuda.py packed muon    # some of them

A stand-in for the CUDA runtime and driver says that there is an H100. Its memory is the host's, and its kernels do
nothing. So torch decides as it would with CUDA (attention kernels, fusion, sizes and order of buffers), Triton and
ptxas compile for sm_90, and what fails before a kernel runs fails here: tracing, shapes, dtypes, devices. It shows no
value, time or race, nothing inside cuBLAS, cuDNN or NCCL, and garbage where a value that a kernel computes decides.
cuDNN's attention needs a GPU for its plans: it is named where torch would take it, and the next best is compiled.
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FAKE = r"""
#include <driver_types.h>  // cudaDeviceProp, and no declarations of functions
#include <string.h>
#include <sys/mman.h>
#define INT(f, value) int f(int *p) { *p = value; return 0; }  // success
#define HANDLE(f) int f(void **p) { *p = (void *)0x1000; return 0; }
static int attribute(int i) { return i == 8 ? 49152 : i == 10 ? 32 : i == 12 || i == 82 ? 65536 : i == 16 ? 132 :
  i == 39 ? 2048 : i == 75 ? 9 : i == 81 ? 233472 : i == 97 ? 232448 : i < 4 ? 1024 : 0; }
int cudaDeviceGetAttribute(int *p, int i, int device) { *p = attribute(i); return 0; }
int cuDeviceGetAttribute(int *p, int i, int device) { *p = attribute(i); return 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p); strcpy(p->name, "NVIDIA H100 80GB HBM3"); p->totalGlobalMem = 85000000000;
  p->major = 9; p->warpSize = 32; p->multiProcessorCount = 132; p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048; p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->l2CacheSize = 52428800;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472; p->memoryBusWidth = 5120; p->unifiedAddressing = 1; return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *p, void *f) {
  memset(p, 0, sizeof *p); p->maxThreadsPerBlock = 1024; p->binaryVersion = p->ptxVersion = 90; return 0; }
int cudaMalloc(void **p, size_t n) {  // pages that nobody writes to take no memory; freed at the end
  *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); return 0; }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return cudaMalloc(p, n); }
int cudaMemcpy(void *to, void *from, size_t n, int kind) { memcpy(to, from, n); return 0; }
int cudaMemcpyAsync(void *to, void *from, size_t n, int kind, void *stream) { memcpy(to, from, n); return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = 85000000000; return 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *p, void *address) { memset(p, 0, sizeof *p); return 0; }
int cudaStreamIsCapturing(void *stream, int *p) { *p = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *p) { *p = 0; return 0; }
int cudaEventElapsedTime(float *ms) { *ms = 1000; return 0; }  // slow, so what is timed is not repeated
int cudaSetDevice(int device) { return 0; }
int cudaGetDriverEntryPointByVersion(char *name, void **f, unsigned version, unsigned long long flags, int *found) {
  *f = cudaSetDevice; *found = 0; return 0; }
void **__cudaRegisterFatBinary(void *code) { static void *handle; return &handle; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *active = 1; return 0; }
int cuModuleGetFunction(void **p, void *module, char *name) { *p = (void *)0x1000; return 0; }
int cuFuncGetAttribute(int *p, int i, void *f) { *p = i ? 0 : 1024; return 0; }
int cuPointerGetAttribute(void **p, int i, void *address) { *p = address; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *result,
  int *found) { memset(result, 0, 64); *found = 1; return 0; }
INT(cudaGetDeviceCount, 1) INT(cudaGetDevice, 0) INT(cudaDriverGetVersion, 13020) INT(cudaRuntimeGetVersion, 13020)
INT(cuDeviceGetCount, 1) INT(cuDeviceGet, 0) INT(cuCtxGetDevice, 0) INT(cuDriverGetVersion, 13020)
INT(cudaDeviceGetStreamPriorityRange, 0) INT(cudaOccupancyMaxActiveBlocksPerMultiprocessor, 1)
HANDLE(cuDevicePrimaryCtxRetain) HANDLE(cuCtxGetCurrent) HANDLE(cuModuleLoadData) HANDLE(cuModuleLoad)
HANDLE(cublasLtMatmulDescCreate) HANDLE(cublasLtMatmulPreferenceCreate) HANDLE(cublasLtMatrixLayoutCreate)
HANDLE(cublasCreate_v2) HANDLE(cudaEventCreateWithFlags) HANDLE(cudaStreamCreateWithPriority) HANDLE(__cudaGetKernel)
"""
if "FAKE_CUDA" not in os.environ:  # torch must find the stand-in when it starts, so this script starts itself again
    with tempfile.TemporaryDirectory() as folder:
        site = subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__path__[0])"], text=True)
        site = Path(site.strip()).parent
        headers = [*site.glob("nvidia/cu1*/include"), site / "triton/backends/nvidia/include"]
        libraries = [f"{site}/torch/lib/lib{name}.so" for name in ("c10_cuda", "torch_cuda", "torch_python")]
        used = "cuInit cuLaunchKernel cuModuleUnload " + (site / "triton/backends/nvidia/driver.c").read_text()
        used += subprocess.check_output(["nm", "-D", "--undefined-only", *libraries], text=True)
        rest = re.findall(r"\b(?:cu(?=[A-Z])|cuda|__cuda|cublas)[A-Z]\w+\b(?<!_t)", used)  # what else is called: 0
        rest = {name for name in rest if "cudaGetError" not in name} - set(re.findall(r"\w+", FAKE))
        code = FAKE + "".join(f"int {name}(void) {{ return 0; }}\n" for name in rest)
        library = f"{folder}/libcuda.so.1"
        subprocess.run(["gcc", "-w", "-shared", "-fPIC", *(f"-I{path}" for path in headers), "-xc", "-", "-o",
                        library], input=code, text=True, check=True)
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env={
            **os.environ, "FAKE_CUDA": folder, "LD_PRELOAD": library, "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }).returncode)

import torch  # noqa: E402
import triton  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from chat_data import packed_mask_and_positions  # noqa: E402
from compiling import compile_options  # noqa: E402
from distributed import make_autocast  # noqa: E402
from model import F, GPT, GPTConfig  # noqa: E402
from muon import muon_updates  # noqa: E402

DEVICE, QWEN = torch.device("cuda"), dict(arch="llama", n_kv_head=4, qk_norm=True)
CASES = {  # the model, dtype, rows, positions; two layers of GPT-2's size show what twelve do
    "gpt2": ({}, "bfloat16", 16, 1024), "gpt2_mla": (dict(attention="mla"), "bfloat16", 16, 1024),
    "qwen3": (QWEN, "bfloat16", 16, 1024), "llama_mla": (dict(arch="llama", attention="mla"), "bfloat16", 16, 1024),
    "packed": (QWEN, "bfloat16", 4, 2048), "float16": ({}, "float16", 16, 1024), "float32": ({}, "float32", 16, 1024)}
chosen, attend = [], F.scaled_dot_product_attention


def attend_and_record(*inputs, **settings):
    torch.backends.cuda.enable_cudnn_sdp(True)
    chosen.append(torch.nn.attention.SDPBackend(torch._fused_sdp_choice(*inputs, **settings)).name)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return attend(*inputs, **settings)


def training_step(args, dtype, B, T, packed):
    """Returns a compiled forward and backward, and records the attention kernel of an uncompiled forward."""
    gpt, idx = GPT(GPTConfig(n_layer=2, max_seq_len=T, **args)).to(DEVICE), torch.zeros(B, T, dtype=int, device=DEVICE)
    batch = {"idx": idx, "targets": idx}
    if packed:
        batch["mask"], batch["positions"] = packed_mask_and_positions(idx > 0, blocks=True)

    F.scaled_dot_product_attention = attend_and_record
    with torch.no_grad(), make_autocast(DEVICE, dtype):
        gpt(**batch)
    F.scaled_dot_product_attention = attend
    compiled = torch.compile(gpt, **options)

    def step():
        gpt.zero_grad()
        with make_autocast(DEVICE, dtype):
            loss = compiled(**batch)
        loss.backward()

    return step


@torch.no_grad()
def muon_step(update=torch.compile(muon_updates, dynamic=False)):
    for rows, cols in ((768, 768), (2304, 768), (3072, 768), (768, 3072)):  # GPT-2's matrices
        update(torch.zeros(2, rows, cols, device=DEVICE), torch.zeros((), dtype=bool, device=DEVICE))


torch.set_float32_matmul_precision("high")  # as in training
options = compile_options({"compile": True, "compile_mode": None, "compile_backend": "inductor"}, DEVICE)
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
for name in sys.argv[1:] or [*CASES, "muon"]:
    torch.compiler.reset()
    chosen.clear()
    step = muon_step if name == "muon" else training_step(*CASES[name], name == "packed")
    graphs = set(run_and_get_code(step)[1])
    torch.cuda.reset_peak_memory_stats()
    step()
    calls = "".join(graph.split("def call(")[-1] for graph in graphs)
    print(f"{name}: {len(graphs)} graphs, {calls.count('.run(')} launches of Triton kernels, "
          f"{calls.count('extern_kernels.')} matmuls, attention {', '.join(set(chosen)) or 'none'}, peak "
          f"{torch.cuda.max_memory_allocated() / 2 ** 20:,.0f} MiB", flush=True)
for path in Path(os.environ["FAKE_CUDA"]).glob("triton/**/*.cubin"):  # with those that a GPU would time and drop
    used = subprocess.check_output([Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump", "-res-usage",
                                    path])
    registers, stack = map(int, re.search(rb"REG:(\d+) STACK:(\d+)", used).groups())
    if stack:
        print(f"spills {stack} bytes, with {registers} registers: {path.stem}")
