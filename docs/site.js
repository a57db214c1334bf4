// Browsers start no worker from a page that no server serves. The search's worker then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      const scripts = `importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = new URL(url, ${JSON.stringify(String(url))});
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
        postMessage = (data) => parent.postMessage(data, "*");`;
      this.frame.srcdoc = `<body><script>${scripts}<\/script><script src="${url}"><\/script></body>`;
      document.body.appendChild(this.frame);
      window.addEventListener("message", (event) => {
        if (event.source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", event));
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
