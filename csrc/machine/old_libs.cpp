// Lets an extension that a newer system compiled load on glibc 2.28 and the libstdc++ of gcc 8
// (manylinux_2_28): inline code of newer C++ headers calls five symbols that those do not have.
// Here they are, hidden in the extension, over what every libstdc++ has.
// tests/project/test_structure.py and auditwheel say when a compiler brings a sixth.
#include <new>

#if defined(__x86_64__) && defined(__GLIBCXX__)
// weak: manylinux's own compiler links some of them statically
#define KT_HIDDEN __attribute__((weak, visibility("hidden")))
#define KT_OLD(ours, name, version) asm(".symver " #ours "," name "@" version)

extern "C" {

// glibc 2.32: "this process never had a second thread"; false only costs an atomic operation.
KT_HIDDEN char __libc_single_threaded = 0;

// gcc 11: what `new T[n]` throws when n * sizeof(T) overflows.
KT_HIDDEN [[noreturn]] void kt_bad_length() asm("_ZSt28__throw_bad_array_new_lengthv");
void kt_bad_length() { throw std::bad_array_new_length(); }

// gcc 12: std::condition_variable::wait, only marked noexcept.
void kt_old_wait(void* cv, void* lock);
KT_OLD(kt_old_wait, "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
KT_HIDDEN void kt_wait(void* cv, void* lock) noexcept
    asm("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void kt_wait(void* cv, void* lock) noexcept { kt_old_wait(cv, lock); }

// gcc 12: std::exception_ptr's count of owners, up and down, which its inline copy constructor and
// destructor call. An exception_ptr is one pointer: a copy that is never destroyed counts up,
// destroying one that was never made counts down.
void kt_old_copy(void* self, const void* other);
void kt_old_destroy(void* self);
KT_OLD(kt_old_copy, "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_", "CXXABI_1.3.3");
KT_OLD(kt_old_destroy, "_ZNSt15__exception_ptr13exception_ptrD1Ev", "CXXABI_1.3.3");
KT_HIDDEN void kt_addref(const void* self) noexcept
    asm("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void kt_addref(const void* self) noexcept {
  void* copy;
  kt_old_copy(&copy, self);
}
KT_HIDDEN void kt_release(void* self) noexcept
    asm("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void kt_release(void* self) noexcept { kt_old_destroy(self); }

}  // extern "C"
#endif
