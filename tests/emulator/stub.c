/* In place of the CUDA runtime and of TVM-FFI under the host code of a kernel that CuTe DSL exported: launches go to a
   callback, errors are kept for the caller, and nothing else happens. No GPU, no driver. */
#include <stddef.h>
#include <string.h>

typedef int (*launch_t)(const char *kernel, void *config, void **arguments);

static launch_t on_launch;
static char message[4096];
static char names[256][512];
static int kernels;

void stub_set_launch(launch_t callback) { on_launch = callback; }
const char *stub_message(void) { return message; }

int _cudaLaunchKernelEx(void *config, void *kernel, void **arguments)
{
    size_t number = (size_t)kernel - 1;
    return on_launch(number < (size_t)kernels ? names[number] : "", config, arguments);
}

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m)
{
    *library = (void *)1;
    return 0;
}

/* A kernel's handle is its number: 0 stays what it is, no kernel. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    if (kernels == 256)
        return 2;
    strncpy(names[kernels], name, sizeof names[0] - 1);
    *kernel = (void *)(size_t)++kernels;
    return 0;
}

int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return 0; }
/* 97: the most shared memory a block may ask for. */
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 97 ? 232448 : 0; return 0; }
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }

int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int), void *error)
{
    if (*library)
        return 0;
    int status = init(library);
    return status ? status : load(library, 0);
}

void cuda_dialect_unload_library_once(void **library) {}

void *TVMFFIEnvGetStream(int type, int device) { return NULL; }

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int count)
{
    message[0] = 0;
    strncat(message, kind, sizeof message - 1);
    strncat(message, ": ", sizeof message - 1 - strlen(message));
    for (int i = 0; i < count; i++)
        if (parts[i])
            strncat(message, parts[i], sizeof message - 1 - strlen(message));
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) { TVMFFIErrorSetRaisedFromCStrParts(kind, &text, 1); }

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_error, int status)
{
    TVMFFIErrorSetRaisedFromCStr("CUDA error", "the launch was refused");
}
